//! What process 1 does from Ready to the end of the VM.

use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use casulo_protocol::agent::CALLS_PATH;
use tokio::sync::Semaphore;
use tokio_vsock::{VsockListener, VsockStream};
use vsock::VMADDR_CID_HOST;

use crate::boot::{Booted, Prepared};
use crate::exec::Engine;
use crate::files::Files;
use crate::reaper::Reaper;
use crate::server::Server;
use crate::streams::Streams;

/// Most MCP connections at once.
const MAX_CONNECTIONS: usize = 16;

/// Serves for ever.
///
/// # Errors
/// The event loop or a listener failed.
pub fn run(booted: Booted) -> io::Result<Infallible> {
    let Booted { prepared, boot_channel, cgroups } = booted;
    let Prepared { mcp, streams: stream_listener, shares, signals, runtime } = prepared;
    let result = runtime.block_on(async move {
        let (reaper, streams) = (Reaper::default(), Streams::new());
        let root = PathBuf::from("/");
        let calls = PathBuf::from(CALLS_PATH);
        let (reaper_of, streams_of) = (reaper.clone(), streams.clone());
        let engine =
            Engine::new(root.clone(), Some(cgroups), reaper_of, streams_of, shares, calls)?;
        let server = Server::new(engine, Files::new(root));
        let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let calls = accept(mcp, move |connection| {
            // One more than there may be is closed at once.
            let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else { return };
            let server = server.clone();
            tokio::spawn(async move {
                server.serve_connection(connection).await;
                drop(permit);
            });
        });
        let bulk = accept(stream_listener, move |connection| {
            let streams = streams.clone();
            tokio::spawn(async move { streams.accept(connection).await });
        });
        tokio::select! {
            result = calls => result,
            result = bulk => result,
            result = reaper.run(signals) => result,
        }
    });
    drop(boot_channel);
    result
}

/// Hands on every connection of the host. The workload may dial these ports too; it is refused.
async fn accept(
    listener: vsock::VsockListener,
    handle: impl Fn(VsockStream),
) -> io::Result<Infallible> {
    let listener = VsockListener::from(OwnedFd::from(listener));
    loop {
        match listener.accept().await {
            Ok((connection, peer)) if peer.cid() == VMADDR_CID_HOST => handle(connection),
            Ok(_) => {}
            // Such as too many open files: the next one may do better, but not at full speed.
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

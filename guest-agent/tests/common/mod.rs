//! An engine on the machine that runs the tests, and the host's side of a stream. Without a cgroup:
//! few machines let a test make one; the guest tests cover that.

#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used, clippy::panic)]

use std::path::PathBuf;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use casulo_agent::exec::{Engine, ExecError, Task};
use casulo_agent::files::Files;
use casulo_agent::reaper::Reaper;
use casulo_agent::server::Server;
use casulo_agent::shares::Shares;
use casulo_agent::streams::Streams;
use casulo_protocol::agent::{Captured, CommandResult, ExecOptions};
use casulo_protocol::stream::{Channel, Decoder, Frame};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

pub struct Guest {
    pub engine: Engine,
    pub streams: Streams,
    pub folder: tempfile::TempDir,
}

pub fn guest() -> Guest {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let streams = Streams::new();
    let (root, reaper) = (PathBuf::from("/"), Reaper::default());
    let (shares, calls) = (Shares::default(), folder.path().join("calls"));
    let engine = Engine::new(root, None, reaper, streams.clone(), shares, calls).unwrap();
    Guest { engine, streams, folder }
}

/// Tests run as root act as uid 1000; others can only be themselves.
pub fn user() -> String {
    let uid = rustix::process::getuid();
    if uid.is_root() { String::new() } else { uid.as_raw().to_string() }
}

impl Guest {
    pub fn options(&self) -> ExecOptions {
        ExecOptions {
            cwd: self.folder.path().to_str().unwrap().to_owned(),
            user: user(),
            max_output: 1 << 20,
            ..ExecOptions::default()
        }
    }

    pub async fn run(
        &self,
        argv: &[&str],
        options: ExecOptions,
    ) -> Result<CommandResult, ExecError> {
        let argv = argv.iter().map(|a| (*a).to_owned()).collect();
        let task = Task { argv, options, extra: None };
        let run = self.engine.run(task, std::future::pending());
        tokio::time::timeout(Duration::from_secs(60), run).await.unwrap()
    }

    pub async fn sh(&self, script: &str) -> CommandResult {
        self.run(&["sh", "-c", script], self.options()).await.unwrap()
    }

    /// Opens a stream and starts `script` on it.
    pub async fn stream(&self, script: &str, change: impl FnOnce(&mut ExecOptions)) -> Session {
        let (mut host, guest) = UnixStream::pair().unwrap();
        let streams = self.streams.clone();
        tokio::spawn(async move { streams.accept(guest).await });
        let mut open = Vec::new();
        Frame::Open(77).encode(&mut open);
        host.write_all(&open).await.unwrap();
        let mut options = self.options();
        options.stream = Some(77);
        change(&mut options);
        let argv = ["sh", "-c", script].map(str::to_owned).to_vec();
        let task = Task { argv, options, extra: None };
        let engine = self.engine.clone();
        let result = tokio::spawn(async move { engine.run(task, std::future::pending()).await });
        Session { host, decoder: Decoder::new(), result }
    }

    pub fn server(&self) -> Server {
        let base = self.folder.path().to_owned();
        Server::new(self.engine.clone(), Files::with_base(PathBuf::from("/"), base))
    }
}

pub struct Session {
    pub host: UnixStream,
    pub decoder: Decoder,
    pub result: tokio::task::JoinHandle<Result<CommandResult, ExecError>>,
}

#[derive(Debug, Default)]
pub struct Heard {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub ends: Vec<Channel>,
    pub resets: Vec<Channel>,
    pub exit: Option<u32>,
}

impl Session {
    pub async fn say(&mut self, frame: &Frame) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.host.write_all(&bytes).await.unwrap();
    }

    /// Hears until the exit frame or until `enough`.
    pub async fn hear(&mut self, heard: &mut Heard, enough: impl Fn(&Heard) -> bool) {
        let mut buffer = vec![0; 65536];
        let limit = tokio::time::Instant::now() + Duration::from_secs(60);
        while !enough(heard) {
            if let Some(frame) = self.decoder.next_frame().unwrap() {
                match frame {
                    Frame::Data(Channel::Stdout, data) => heard.stdout.extend(data),
                    Frame::Data(Channel::Stderr, data) => heard.stderr.extend(data),
                    Frame::End(channel) => heard.ends.push(channel),
                    Frame::Reset(channel) => heard.resets.push(channel),
                    Frame::Exit(status) => {
                        heard.exit = Some(status);
                        return;
                    }
                    other => panic!("unexpected {other:?}"),
                }
                continue;
            }
            let read = tokio::time::timeout_at(limit, self.host.read(&mut buffer)).await;
            let length = read.unwrap().unwrap();
            assert!(length > 0, "the stream ended early: {heard:?}");
            self.decoder.feed(&buffer[..length]);
        }
    }

    pub async fn finish(mut self) -> (Heard, CommandResult) {
        let mut heard = Heard::default();
        self.hear(&mut heard, |_| false).await;
        heard.ends.sort_by_key(|c| *c as u8);
        (heard, self.result.await.unwrap().unwrap())
    }
}

pub fn bytes(captured: &Captured) -> Vec<u8> {
    let mut all = STANDARD.decode(&captured.head).unwrap();
    all.extend(STANDARD.decode(&captured.tail).unwrap());
    all
}

pub fn text(captured: &Captured) -> String {
    String::from_utf8(bytes(captured)).unwrap()
}

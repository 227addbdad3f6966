//! Bulk streams that the host has opened and that wait for the call that names them.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use casulo_protocol::stream::{Decoder, Frame};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite};
use tokio::sync::oneshot;

/// How long a stream waits for its call, a call for its stream, and a new connection may take to
/// say its token.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// Most connections that wait, named or not.
const MAX_WAITING: usize = 64;

/// What carries a stream: a vsock connection, or a socket pair in tests.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// A stream whose token is known.
pub struct Stream {
    /// The connection.
    pub io: Box<dyn Io>,
    /// Holds what came after the token.
    pub decoder: Decoder,
}

/// Why a call does not get its stream.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// It did not come.
    #[error("no stream with this token was opened within 10 seconds")]
    Missing,
    /// Another call waits for the same token.
    #[error("another call already waits for a stream with this token")]
    Taken,
    /// Too many calls wait.
    #[error("too many calls wait for their streams")]
    Full,
}

/// The streams that wait, and the calls that wait for one.
#[derive(Clone, Default)]
pub struct Streams(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// Connections that have not said their token.
    unnamed: usize,
    ready: HashMap<u64, (u64, Stream)>,
    wanted: HashMap<u64, oneshot::Sender<Stream>>,
    /// Tokens of calls that were given up before their streams came, the newest last.
    abandoned: VecDeque<u64>,
    /// Tells streams with the same token apart.
    serial: u64,
}

impl Streams {
    /// No streams.
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        // The lock is never held across anything that can fail.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the token from a new connection and keeps it for its call. Closes the connection if it
    /// says something else, nothing within [`PATIENCE`], a token that waits already, or if too many
    /// wait.
    pub async fn accept(&self, io: impl Io + 'static) {
        {
            let mut state = self.state();
            if state.unnamed + state.ready.len() >= MAX_WAITING {
                return;
            }
            state.unnamed += 1;
        }
        let named = tokio::time::timeout(PATIENCE, read_token(Box::new(io))).await;
        let serial = {
            let mut state = self.state();
            state.unnamed -= 1;
            let Ok(Ok((token, mut stream))) = named else { return };
            if let Some(place) = state.abandoned.iter().position(|one| *one == token) {
                state.abandoned.remove(place);
                return;
            }
            if let Some(call) = state.wanted.remove(&token) {
                match call.send(stream) {
                    Ok(()) => return,
                    // The call has just given up.
                    Err(back) => stream = back,
                }
            }
            if state.ready.contains_key(&token) {
                return;
            }
            state.serial += 1;
            let serial = state.serial;
            state.ready.insert(token, (serial, stream));
            (token, serial)
        };
        tokio::time::sleep(PATIENCE).await;
        let (token, serial) = serial;
        let mut state = self.state();
        if state.ready.get(&token).is_some_and(|(s, _)| *s == serial) {
            state.ready.remove(&token);
        }
    }

    /// Nobody wants the stream with this token any more: it is closed, or will be when it comes.
    pub fn abandon(&self, token: u64) {
        let mut state = self.state();
        state.wanted.remove(&token);
        if state.ready.remove(&token).is_none() {
            if state.abandoned.len() >= MAX_WAITING {
                state.abandoned.pop_front();
            }
            state.abandoned.push_back(token);
        }
    }

    /// The stream with this token, which may still be on its way.
    ///
    /// # Errors
    /// It does not come, or is not ours to take.
    pub async fn take(&self, token: u64) -> Result<Stream, StreamError> {
        let wait = {
            let mut state = self.state();
            if let Some((_, stream)) = state.ready.remove(&token) {
                return Ok(stream);
            }
            // A call that gave up leaves its entry; it is of no use to anyone.
            state.wanted.retain(|_, call| !call.is_closed());
            if state.wanted.contains_key(&token) {
                return Err(StreamError::Taken);
            }
            if state.wanted.len() >= MAX_WAITING {
                return Err(StreamError::Full);
            }
            let (call, wait) = oneshot::channel();
            state.wanted.insert(token, call);
            wait
        };
        match tokio::time::timeout(PATIENCE, wait).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(_)) | Err(_) => {
                self.state().wanted.remove(&token);
                Err(StreamError::Missing)
            }
        }
    }
}

async fn read_token(mut io: Box<dyn Io>) -> io::Result<(u64, Stream)> {
    let mut decoder = Decoder::new();
    let mut buffer = [0; 256];
    loop {
        let length = io.read(&mut buffer).await?;
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        decoder.feed(buffer.get(..length).unwrap_or_default());
        match decoder.next_frame().map_err(io::Error::other)? {
            Some(Frame::Open(token)) => return Ok((token, Stream { io, decoder })),
            Some(_) => return Err(io::Error::other("a stream must begin with its token")),
            // A first frame that is longer than this is no token.
            None if length == buffer.len() => return Err(io::ErrorKind::InvalidData.into()),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    fn opening(token: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        Frame::Open(token).encode(&mut bytes);
        bytes
    }

    #[tokio::test(start_paused = true)]
    async fn stream_and_call_meet_in_either_order() {
        let streams = Streams::new();
        for call_first in [false, true] {
            let (mut host, guest) = tokio::io::duplex(64);
            let (s, c) = (streams.clone(), streams.clone());
            let call = async move {
                if !call_first {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                c.take(7).await
            };
            tokio::spawn(async move { s.accept(guest).await });
            let host = async move {
                if call_first {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                host.write_all(&opening(7)).await.unwrap();
                host
            };
            let (taken, _host) = tokio::join!(call, host);
            assert!(taken.is_ok());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_is_bounded_in_time_and_number() {
        let streams = Streams::new();
        assert_eq!(streams.take(1).await.err(), Some(StreamError::Missing));

        let mut hosts = Vec::new();
        for token in 0..100 {
            let (mut host, guest) = tokio::io::duplex(64);
            host.write_all(&opening(token)).await.unwrap();
            let s = streams.clone();
            tokio::spawn(async move { s.accept(guest).await });
            hosts.push(host);
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(streams.state().ready.len(), MAX_WAITING);
        tokio::time::sleep(PATIENCE).await;
        assert_eq!(streams.state().ready.len(), 0);
        assert_eq!(streams.state().unnamed, 0);
        assert!(streams.state().wanted.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_says_something_else_is_closed() {
        let mut end = Vec::new();
        Frame::Exit(0).encode(&mut end);
        for first in [end, vec![0xff; 300], vec![2, 1, 0, 0, 0, 4, 0, 0]] {
            let streams = Streams::new();
            let (mut host, guest) = tokio::io::duplex(1024);
            host.write_all(&first).await.unwrap();
            streams.accept(guest).await;
            assert_eq!(host.read(&mut [0; 8]).await.unwrap(), 0);
            assert!(streams.state().ready.is_empty());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_nobody_wants_any_more_is_closed_at_once_whenever_it_comes() {
        let streams = Streams::new();
        for before in [false, true] {
            let (mut host, guest) = tokio::io::duplex(64);
            host.write_all(&opening(7)).await.unwrap();
            if before {
                streams.abandon(7);
            }
            let began = tokio::time::Instant::now();
            let accepting = tokio::spawn({
                let streams = streams.clone();
                async move { streams.accept(guest).await }
            });
            while !before && streams.state().ready.is_empty() {
                tokio::task::yield_now().await;
            }
            if !before {
                streams.abandon(7);
            }
            assert_eq!(host.read(&mut [0; 8]).await.unwrap(), 0);
            assert!(began.elapsed() < PATIENCE);
            accepting.await.unwrap();
        }
        for token in 0..1000 {
            streams.abandon(token);
        }
        assert_eq!(streams.state().abandoned.len(), MAX_WAITING);
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_call_or_stream_of_the_same_token_is_refused() {
        let streams = Streams::new();
        let first = {
            let s = streams.clone();
            tokio::spawn(async move { s.take(1).await.err() })
        };
        tokio::task::yield_now().await;
        assert_eq!(streams.take(1).await.err(), Some(StreamError::Taken));
        assert_eq!(first.await.unwrap(), Some(StreamError::Missing));
    }
}

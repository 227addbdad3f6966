//! What the host reads from the guest's agent, and from a VMM that its guest has taken over.
#![no_main]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use arbitrary::Arbitrary;
use casulo::fuzzing;
use casulo_fuzz::limits::Limits;
use casulo_fuzz::program::Data;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

#[derive(Arbitrary, Debug)]
enum Program {
    /// The boot channel.
    Boot(Vec<Step>),
    /// The bulk stream of a command.
    Stream(Vec<Step>),
    /// Answers to calls of the agent's tools.
    Calls(Vec<Step>),
    /// Messages of the VMM, with or without a descriptor beside them.
    Vmm(Vec<(Line, bool)>),
}

#[derive(Arbitrary, Debug)]
enum Step {
    /// Takes what the host has said so far, after it had its turn.
    Listen,
    /// A line of JSON.
    Line(Line),
    /// A frame: kind, channel, payload, and its length if that is a lie.
    Frame(u8, u8, Data, Option<u32>),
    /// Anything.
    Bytes(Data),
}

#[derive(Arbitrary, Debug)]
enum Line {
    Hello {
        protocol: u8,
        agent: Text,
    },
    Ready(Json),
    Failed(Text),
    /// The answer to a call: its number, whether the tool failed, and what it says.
    Answer {
        id: Id,
        failed: bool,
        text: Text,
        content: Json,
    },
    /// A refusal of a call.
    Error {
        id: Id,
        code: i32,
        message: Text,
    },
    /// A request or notification of the agent.
    Ask {
        id: Option<Id>,
        method: u8,
        parameters: Json,
    },
    /// A message of the VMM with any fields.
    Message {
        name: u8,
        fields: Vec<(Key, Json)>,
    },
    /// The same with the fields that it has.
    WholeMessage {
        name: u8,
        number: u8,
        text: Text,
    },
    Any(Json),
}

#[derive(Arbitrary, Debug)]
enum Id {
    Number(u8),
    Any(Json),
}

#[derive(Arbitrary, Debug)]
enum Json {
    Null,
    Bool(bool),
    Number(i64),
    Float(f64),
    Text(Text),
    List(Vec<Json>),
    Map(Vec<(Key, Json)>),
}

#[derive(Arbitrary, Debug)]
enum Key {
    Known(u8),
    Any(Text),
}

#[derive(Arbitrary, Debug)]
enum Text {
    Some(String),
    Control,
    Long(char, u16),
}

const KEYS: [&str; 36] = [
    "protocol",
    "agent",
    "started_us",
    "dialled_us",
    "ready_us",
    "error",
    "size",
    "data",
    "exit_code",
    "signal",
    "timed_out",
    "oom",
    "start_error",
    "stdout",
    "stderr",
    "head",
    "tail",
    "bytes",
    "duration_ms",
    "entries",
    "truncated",
    "path",
    "kind",
    "mode",
    "modified",
    "id",
    "port",
    "console",
    "counters",
    "reason",
    "phase",
    "detail",
    "exits",
    "page_faults",
    "content",
    "type",
];
const METHODS: [&str; 8] = [
    "notifications/progress",
    "notifications/cancelled",
    "ping",
    "roots/list",
    "sampling/createMessage",
    "elicitation/create",
    "notifications/message",
    "server/discover",
];
const MESSAGES: [&str; 8] =
    ["started", "failed", "connected", "refused", "accepted", "report", "exited", "watchdog"];

impl Text {
    fn string(&self) -> String {
        match self {
            Self::Some(text) => text.clone(),
            Self::Control => "\u{1b}[2J\u{7}\u{9b}31m".into(),
            Self::Long(char, count) => std::iter::repeat_n(*char, usize::from(*count)).collect(),
        }
    }
}

impl Key {
    fn string(&self) -> String {
        match self {
            Self::Known(n) => KEYS[usize::from(*n) % KEYS.len()].into(),
            Self::Any(text) => text.string(),
        }
    }
}

fn map(fields: &[(Key, Json)]) -> Map<String, Value> {
    fields.iter().map(|(key, value)| (key.string(), value.value())).collect()
}

impl Json {
    fn value(&self) -> Value {
        match self {
            Self::Null => Value::Null,
            Self::Bool(bool) => json!(bool),
            Self::Number(number) => json!(number),
            Self::Float(number) => json!(number),
            Self::Text(text) => json!(text.string()),
            Self::List(list) => list.iter().map(Json::value).collect(),
            Self::Map(fields) => Value::Object(map(fields)),
        }
    }
}

impl Id {
    fn value(&self) -> Value {
        match self {
            Self::Number(number) => json!(number),
            Self::Any(json) => json.value(),
        }
    }
}

impl Line {
    fn value(&self) -> Value {
        match self {
            Self::Hello { protocol, agent } => {
                let agent = agent.string();
                json!({"protocol": protocol, "agent": agent, "started_us": 1, "dialled_us": 2})
            }
            Self::Ready(time) => json!({"ready_us": time.value()}),
            Self::Failed(error) => json!({"error": error.string()}),
            Self::Answer { id, failed, text, content } => json!({
                "jsonrpc": "2.0",
                "id": id.value(),
                "result": {
                    "resultType": "complete",
                    "isError": failed,
                    "content": [{"type": "text", "text": text.string()}],
                    "structuredContent": content.value(),
                },
            }),
            Self::Error { id, code, message } => json!({
                "jsonrpc": "2.0",
                "id": id.value(),
                "error": {"code": code, "message": message.string()},
            }),
            Self::Ask { id, method, parameters } => {
                let method = METHODS[usize::from(*method) % METHODS.len()];
                let mut ask =
                    json!({"jsonrpc": "2.0", "method": method, "params": parameters.value()});
                if let Some(id) = id {
                    ask["id"] = id.value();
                }
                ask
            }
            Self::Message { name, fields } => {
                let mut message = map(fields);
                message.insert("message".into(), json!(MESSAGES[usize::from(*name) % 8]));
                Value::Object(message)
            }
            Self::WholeMessage { name, number, text } => json!({
                "message": MESSAGES[usize::from(*name) % 8],
                "id": number,
                "port": number,
                "phase": text.string(),
                "error": text.string(),
                "console": text.string(),
                "counters": {"exits": number},
                "reason": {"kind": "vmm", "detail": text.string()},
            }),
            Self::Any(json) => json.value(),
        }
    }
}

/// What the other side says, ready to be sent: its memory is not the host's.
enum Said {
    Listen,
    Bytes(Vec<u8>),
}

/// Most bytes of all messages. What the longest lines cost is more than the limits of this process, and
/// has tests of its own beside the code that bounds them.
const ALL: usize = 2 << 20;

/// What comes first and is not too long in all.
fn bounded<T>(all: impl Iterator<Item = T>, length: impl Fn(&T) -> usize) -> Vec<T> {
    let mut left = ALL;
    all.take_while(|one| {
        let fits = left.checked_sub(length(one));
        left = fits.unwrap_or(0);
        fits.is_some()
    })
    .collect()
}

fn said(steps: &[Step]) -> Vec<Said> {
    let said = steps.iter().take(64).map(|step| match step {
        Step::Listen => Said::Listen,
        Step::Line(line) => Said::Bytes(format!("{}\n", line.value()).into_bytes()),
        Step::Frame(kind, channel, data, length) => {
            let data = data.bytes();
            let length = length.unwrap_or(data.len() as u32);
            let mut bytes = vec![kind % 9, channel % 4, 0, 0];
            bytes.extend(length.to_le_bytes());
            bytes.extend(data);
            Said::Bytes(bytes)
        }
        Step::Bytes(data) => Said::Bytes(data.bytes()),
    });
    bounded(said, |said| match said {
        Said::Listen => 0,
        Said::Bytes(bytes) => bytes.capacity(),
    })
}

/// Says a program to the host, then hangs up. The host may do so first.
async fn say(mut stream: UnixStream, said: Vec<Said>) {
    let mut heard = [0; 4096];
    for step in said {
        let bytes = match step {
            Said::Listen => {
                for _ in 0..8 {
                    tokio::task::yield_now().await;
                }
                let _ = stream.try_read(&mut heard);
                continue;
            }
            Said::Bytes(bytes) => bytes,
        };
        if stream.write_all(&bytes).await.is_err() {
            return;
        }
    }
    let _ = stream.shutdown().await;
    while matches!(stream.read(&mut heard).await, Ok(1..)) {}
}

/// A program whose messages are ready.
enum Prepared {
    Boot(Vec<Said>),
    Stream(Vec<Said>),
    Calls(Vec<Said>),
    Vmm(Vec<(String, bool)>),
}

impl Prepared {
    fn new(program: &Program) -> Self {
        match program {
            Program::Boot(steps) => Self::Boot(said(steps)),
            Program::Stream(steps) => Self::Stream(said(steps)),
            Program::Calls(steps) => Self::Calls(said(steps)),
            Program::Vmm(lines) => {
                let lines = lines.iter().take(32).map(|(line, fd)| (line.value().to_string(), *fd));
                Self::Vmm(bounded(lines, |(packet, _)| packet.capacity()))
            }
        }
    }
}

async fn talk(program: Prepared) {
    let pair = || UnixStream::pair().expect("a socket pair");
    match program {
        Prepared::Boot(said) => {
            let (ours, theirs) = pair();
            tokio::join!(fuzzing::boot(ours), say(theirs, said));
        }
        Prepared::Stream(said) => {
            let (ours, theirs) = pair();
            tokio::join!(fuzzing::stream(ours), say(theirs, said));
        }
        Prepared::Calls(said) => {
            let (ours, theirs) = pair();
            tokio::join!(fuzzing::calls(ours), say(theirs, said));
        }
        Prepared::Vmm(packets) => {
            let (vmm, theirs) = fuzzing::Vmm::new().expect("a socket pair");
            tokio::join!(say_packets(theirs, packets), vmm.end());
        }
    }
}

async fn say_packets(socket: OwnedFd, packets: Vec<(String, bool)>) {
    for (packet, with_fd) in packets {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        let (one, _other) = std::os::unix::net::UnixStream::pair().expect("a socket pair");
        let fds = [one.as_fd()];
        if with_fd {
            assert!(beside.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        let part = std::io::IoSlice::new(packet.as_bytes());
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        if sendmsg(&socket, &[part], &mut beside, flags).is_err() {
            return;
        }
        tokio::task::yield_now().await;
    }
}

fn ignore_broken_pipes() {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(|| {
        signal_hook::flag::register(signal_hook::consts::SIGPIPE, Arc::default())
            .map(drop)
            .expect("a signal handler");
    });
}

libfuzzer_sys::fuzz_target!(|program: Program| {
    ignore_broken_pipes();
    let program = Prepared::new(&program);
    let limits = Limits::new();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(talk(program));
    drop(runtime);
    limits.check();
});

//! Vsock between this process and a real guest kernel, without the agent: `casulo-vmm` boots the program
//! in `vmm/examples/vsock_guest`.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::ops::Deref;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use casulo_protocol::vmm::{Message, Request};

use crate::support::{PATIENCE, casulo_path, folder, home, wait_for};
use parent::{Guest, Parent};
use wire::{
    ABORT, CHECK, DIAL, DIALLED, ECHO, HALF_CLOSE, Order, Pattern, REPORTS, Report, SERVICE, Sizes,
    mix,
};

#[path = "../../vmm/tests/common/parent.rs"]
mod parent;
#[path = "../../vmm/examples/vsock_guest/wire.rs"]
mod wire;

/// Connections at once.
const CONNECTIONS: u64 = 256;
/// How long data moves on them.
const TIME: Duration = Duration::from_secs(60);

/// A booted guest; it ends with this.
struct Vm(Arc<Switchboard>);

impl Deref for Vm {
    type Target = Arc<Switchboard>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        // Its messages end, and with them the thread that waits for them.
        self.parent.kill();
    }
}

/// Brings every connection to whoever waits for it.
struct Switchboard {
    parent: Parent,
    connecting: Mutex<HashMap<u64, Sender<Result<UnixStream, String>>>>,
    next: AtomicU64,
    dialled: Mutex<HashMap<u64, Sender<UnixStream>>>,
    reports: Mutex<HashMap<u64, Sender<Report>>>,
    _folder: tempfile::TempDir,
}

impl Vm {
    fn boot(memory_mib: u32) -> Self {
        let folder = folder();
        let volume = folder.path().join("guest.erofs");
        let binaries: PathBuf = casulo_path().with_file_name("");
        let made = Command::new(binaries.join("xtask"))
            .arg("volume")
            .arg(binaries.join("examples/vsock_guest"))
            .arg(&volume)
            .status()
            .unwrap();
        assert!(made.success());
        let guest = Guest {
            vmm: &binaries.join("casulo-vmm"),
            kernel: &home().join("kernel/vmlinux"),
            volume: &volume,
            cpus: 2,
            memory_mib,
            listen: vec![DIALLED, REPORTS],
        };
        let switchboard = Arc::new(Switchboard {
            parent: Parent::start(&guest).unwrap(),
            connecting: Mutex::default(),
            next: AtomicU64::new(1),
            dialled: Mutex::default(),
            reports: Mutex::default(),
            _folder: folder,
        });
        let vm = Self(Arc::clone(&switchboard));
        thread::spawn(move || {
            while let Ok((message, stream)) = switchboard.parent.receive() {
                switchboard.message(message, stream);
            }
        });
        // Once the guest listens.
        drop(vm.service());
        vm
    }
}

impl Switchboard {
    fn message(self: &Arc<Self>, message: Message, stream: Option<UnixStream>) {
        match message {
            Message::Connected { id } => {
                let waiting = self.connecting.lock().unwrap().remove(&id).unwrap();
                let _ = waiting.send(Ok(stream.unwrap()));
            }
            Message::Refused { id, error } => {
                let waiting = self.connecting.lock().unwrap().remove(&id).unwrap();
                let _ = waiting.send(Err(error));
            }
            Message::Accepted { port } => {
                // What the guest says first comes in its time.
                let (vm, mut stream) = (Arc::clone(self), stream.unwrap());
                small_thread(move || match port {
                    DIALLED => {
                        let mut seed = [0; 8];
                        // A guest that has lost its patience with a busy host tries again.
                        if stream.read_exact(&mut seed).is_err() {
                            return;
                        }
                        let seed = u64::from_le_bytes(seed);
                        let waiting = vm.dialled.lock().unwrap().remove(&seed).unwrap();
                        waiting.send(stream).unwrap();
                    }
                    REPORTS => {
                        let mut report = [0; Report::LEN];
                        if stream.read_exact(&mut report).is_err() {
                            return;
                        }
                        let report = Report::from_bytes(report);
                        let waiting = vm.reports.lock().unwrap().remove(&report.seed).unwrap();
                        let _ = waiting.send(report);
                    }
                    other => panic!("a connection to port {other}"),
                });
            }
            other => panic!("the guest ended: {other:?}"),
        }
    }

    fn connect(&self, port: u32) -> Result<UnixStream, String> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (answer, wait) = channel();
        self.connecting.lock().unwrap().insert(id, answer);
        self.parent.request(&Request::Connect { id, port }).unwrap();
        wait.recv_timeout(PATIENCE).unwrap()
    }

    /// A connection to the guest's program, which may not listen yet, or have a full backlog.
    fn service(&self) -> UnixStream {
        wait_for("a connection", || self.connect(SERVICE).ok())
    }

    fn order(&self, order: Order) -> UnixStream {
        let mut stream = self.service();
        stream.write_all(&order.to_bytes()).unwrap();
        stream
    }

    /// A connection opened by the host or by the guest, and where its report will come.
    fn open(&self, order: Order) -> (UnixStream, Receiver<Report>) {
        let (report, reported) = channel();
        self.reports.lock().unwrap().insert(order.seed, report);
        let (dialled, stream) = channel();
        if order.kind == DIAL {
            self.dialled.lock().unwrap().insert(order.seed, dialled);
        }
        let ordered = self.order(order);
        match order.kind {
            DIAL => (stream.recv_timeout(PATIENCE).unwrap(), reported),
            _ => (ordered, reported),
        }
    }

    /// How often the thread that serves vsock has gone to sleep so far.
    fn wakeups(&self) -> u64 {
        let tasks = format!("/proc/{}/task", self.parent.id());
        for task in fs::read_dir(tasks).unwrap() {
            let task = task.unwrap().path();
            if fs::read_to_string(task.join("comm")).unwrap().trim() == "vsock" {
                let status = fs::read_to_string(task.join("status")).unwrap();
                let line = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
                return line.unwrap().trim().parse().unwrap();
            }
        }
        panic!("no thread is called vsock");
    }
}

fn small_thread<T: Send + 'static>(
    body: impl FnOnce() -> T + Send + 'static,
) -> thread::JoinHandle<T> {
    thread::Builder::new().stack_size(128 * 1024).spawn(body).unwrap()
}

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The host's direction ends in the middle, the guest's goes on.
    HostFirst,
    /// The guest's direction ends in the middle, the host's goes on.
    GuestFirst,
    /// The host closes in the middle of everything.
    HostAborts,
    /// The guest does.
    GuestAborts,
}

/// Bytes that were checked on one connection.
#[derive(Clone, Copy, Debug, Default)]
struct Moved {
    to_guest: u64,
    to_host: u64,
}

/// One connection from its beginning to its end; every byte is checked on both sides.
fn converse(
    vm: &Switchboard,
    seed: u64,
    dial: bool,
    end: End,
    time: Duration,
    start: &Barrier,
) -> Moved {
    let whole = u64::try_from(time.as_millis()).unwrap();
    let half = whole / 2;
    let (host_time, guest_time) = match end {
        End::HostFirst | End::HostAborts => (half, whole),
        End::GuestFirst | End::GuestAborts => (whole, half),
    };
    let order = Order {
        kind: if dial { DIAL } else { CHECK },
        size: if end == End::GuestAborts { ABORT } else { HALF_CLOSE },
        bytes: 0,
        millis: guest_time,
        seed,
    };
    let (stream, reported) = vm.open(order);
    start.wait();
    let until = Instant::now() + Duration::from_millis(host_time);
    let writer = stream.try_clone().unwrap();
    let abort = end == End::HostAborts;
    let writer = small_thread(move || write_pattern(&writer, seed, until, abort));
    let (to_host, ended) = read_pattern(&stream, seed, abort.then_some(until));
    let written = writer.join().unwrap();
    drop(stream);
    let report = reported.recv_timeout(PATIENCE).unwrap();
    let what = format!("{end:?}, dialled {dial}, host wrote {written} read {to_host}: {report:?}");
    assert!(!report.wrong, "the guest read a wrong byte: {what}");
    assert!(report.read <= written && to_host <= report.written, "{what}");
    match end {
        End::HostFirst | End::GuestFirst => {
            assert!(ended && report.ended, "no end of the stream: {what}");
            assert_eq!((report.read, report.written), (written, to_host), "{what}");
        }
        // What the guest wrote before it closed arrives.
        End::GuestAborts => assert_eq!(to_host, report.written, "{what}"),
        End::HostAborts => {}
    }
    Moved { to_guest: report.read, to_host }
}

/// Writes until the time is over or nobody reads any more; returns how many bytes were written.
fn write_pattern(mut stream: &UnixStream, seed: u64, until: Instant, abort: bool) -> u64 {
    let mut pattern = Pattern::of_host(seed);
    let mut sizes = Sizes::new(!seed);
    let mut buffer = vec![0; Sizes::MOST];
    while Instant::now() < until {
        let part = &mut buffer[..sizes.next()];
        pattern.fill(part);
        let mut left = &*part;
        while !left.is_empty() {
            match stream.write(left) {
                Ok(count) => left = &left[count..],
                Err(_) => {
                    pattern.rewind(left.len());
                    return pattern.position();
                }
            }
        }
    }
    if !abort {
        let _ = stream.shutdown(Shutdown::Write);
    }
    pattern.position()
}

/// Reads to the end, or to the moment of the abort; returns how many bytes that were and whether the
/// stream ended.
fn read_pattern(mut stream: &UnixStream, seed: u64, abort: Option<Instant>) -> (u64, bool) {
    let mut pattern = Pattern::of_guest(seed);
    let mut buffer = vec![0; 64 * 1024];
    while abort.is_none_or(|at| Instant::now() < at) {
        match stream.read(&mut buffer) {
            Ok(0) => return (pattern.position(), true),
            Ok(count) => {
                let at = pattern.position();
                assert!(pattern.check(&buffer[..count]), "a wrong byte behind {at}");
            }
            Err(_) => return (pattern.position(), false),
        }
    }
    // The writer waits for a reader that is not coming back.
    let _ = stream.shutdown(Shutdown::Both);
    (pattern.position(), false)
}

#[test]
fn vsock_256_connections_move_checked_data_both_ways_for_a_minute() {
    let vm = Vm::boot(1024);
    let start = Arc::new(Barrier::new(usize::try_from(CONNECTIONS).unwrap()));
    let begin = Instant::now();
    let threads: Vec<_> = (0..CONNECTIONS)
        .map(|slot| {
            let (vm, start) = (Arc::clone(&*vm), Arc::clone(&start));
            small_thread(move || {
                let mut moved = Vec::new();
                let mut first = true;
                // Half of them last the whole time; the others end and begin all the while.
                let mut round = 0;
                while first || begin.elapsed() < TIME {
                    let seed = slot << 32 | round;
                    let dice = mix(seed);
                    let end = match (slot % 2, dice % 4) {
                        (0, choice) if choice % 2 == 0 => End::HostFirst,
                        (0, _) => End::GuestFirst,
                        (_, 0) => End::HostFirst,
                        (_, 1) => End::GuestFirst,
                        (_, 2) => End::HostAborts,
                        _ => End::GuestAborts,
                    };
                    let time = match slot % 2 {
                        0 => TIME,
                        _ => Duration::from_millis(2000 + (dice >> 8) % 8000),
                    };
                    let one = Barrier::new(1);
                    // All are open before the first begins.
                    let start = if first { &*start } else { &one };
                    moved.push((end, converse(&vm, seed, dice >> 40 & 1 == 1, end, time, start)));
                    first = false;
                    round += 1;
                    if slot % 2 == 0 {
                        break;
                    }
                }
                moved
            })
        })
        .collect();
    let mut counts: HashMap<String, (u64, Moved)> = HashMap::new();
    for (slot, thread) in threads.into_iter().enumerate() {
        let conversations = thread.join().unwrap();
        // A short one may be over before its turn has come in the guest.
        let moved =
            |pick: fn(&Moved) -> u64| conversations.iter().map(|(_, m)| pick(m)).sum::<u64>();
        let (to_guest, to_host) = (moved(|m| m.to_guest), moved(|m| m.to_host));
        assert!(to_guest > 0 && to_host > 0, "connection {slot}: {conversations:?}");
        for (end, moved) in conversations {
            let (count, sum) = counts.entry(format!("{end:?}")).or_default();
            *count += 1;
            sum.to_guest += moved.to_guest;
            sum.to_host += moved.to_host;
        }
    }
    assert!(begin.elapsed() >= TIME);
    assert_eq!(counts.len(), 4, "{counts:?}");
    eprintln!("{counts:?} in {:?}", begin.elapsed());
}

#[test]
fn vsock_stalled_and_dead_peers_cost_no_wakeups() {
    let vm = Vm::boot(128);
    let order = |kind, seed| Order { kind, size: HALF_CLOSE, bytes: 0, millis: 3_600_000, seed };
    // A host that does not read: the guest writes until its credit is used up.
    let (deaf, _report) = vm.open(order(CHECK, 1));
    // A guest that does not read, because its writes do not get through: what it echoes fills everything
    // on the way back, then everything on the way there.
    let mut stuck = vm.order(order(ECHO, 2));
    stuck.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    let error = stuck.write_all(&vec![0; 16 << 20]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    // And one whose host dies while it is stuck.
    let mut dead = vm.order(order(ECHO, 3));
    dead.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    assert!(dead.write_all(&vec![0; 16 << 20]).is_err());
    drop(dead);
    // Whatever was under way comes to rest.
    thread::sleep(Duration::from_secs(3));
    let before = vm.wakeups();
    thread::sleep(Duration::from_secs(10));
    let count = vm.wakeups() - before;
    // A stalled connection asks for credit every few seconds, and the guest answers.
    assert!(count < 50, "{count} wake-ups in 10 s");
    // It all still works.
    let mut stream = vm.order(order(ECHO, 4));
    stream.write_all(b"alive").unwrap();
    let mut answer = [0; 5];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"alive");
    drop((deaf, stuck));
}

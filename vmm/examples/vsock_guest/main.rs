//! Process 1 of a guest that does nothing but talk over vsock: the other end of the vsock tests and
//! benches. It takes orders (see [`wire`]) on a port, one thread for each connection.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::thread;
use std::time::{Duration, Instant};

use vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VsockListener, VsockStream};

use wire::{
    ABORT, CHECK, DIAL, DIALLED, ECHO, Order, Pattern, REPORTS, Report, SERVICE, SINK, SOURCE,
    Sizes,
};

mod wire;

/// Stack of a thread; what is large is on the heap.
const STACK: usize = 64 * 1024;
/// Bytes of a read.
const READ: usize = 64 * 1024;

fn main() {
    // Process 1 must not end: the kernel would panic. The console says why nothing goes on.
    let error = serve();
    eprintln!("vsock_guest: {error:?}");
    loop {
        thread::park();
    }
}

fn serve() -> io::Result<()> {
    let listener = VsockListener::bind_with_cid_port(VMADDR_CID_ANY, SERVICE)?;
    eprintln!("vsock_guest: ready");
    loop {
        let (stream, _) = listener.accept()?;
        spawn(move || serve_one(stream))?;
    }
}

fn spawn<T: Send + 'static>(
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<thread::JoinHandle<T>> {
    thread::Builder::new().stack_size(STACK).spawn(body)
}

fn serve_one(mut stream: VsockStream) {
    let mut order = [0; Order::LEN];
    // A host that closes before it has said what it wants is no fault of ours.
    if stream.read_exact(&mut order).is_err() {
        return;
    }
    let order = Order::from_bytes(order);
    let result = match order.kind {
        SINK => sink(stream, order),
        SOURCE => source(stream, order),
        ECHO => echo(stream),
        CHECK => check(stream, order),
        DIAL => dial(order),
        other => Err(io::Error::other(format!("unknown order {other}"))),
    };
    if let Err(error) = result {
        eprintln!("vsock_guest: {order:?}: {error}");
    }
}

fn sink(mut stream: VsockStream, order: Order) -> io::Result<()> {
    let mut buffer = vec![0; order.size as usize];
    let mut left = order.bytes;
    while left > 0 {
        let most = buffer.len().min(left as usize);
        match stream.read(&mut buffer[..most])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => left -= count as u64,
        }
    }
    stream.write_all(&[1])
}

fn source(mut stream: VsockStream, order: Order) -> io::Result<()> {
    let buffer = vec![7; order.size as usize];
    let mut left = order.bytes;
    while left > 0 {
        let len = buffer.len().min(left as usize);
        stream.write_all(&buffer[..len])?;
        left -= len as u64;
    }
    // The host closes when it has all.
    stream.read(&mut [0]).map(drop)
}

fn echo(mut stream: VsockStream) -> io::Result<()> {
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            count => stream.write_all(&buffer[..count])?,
        }
    }
}

fn dial(order: Order) -> io::Result<()> {
    let mut stream = connect(DIALLED)?;
    stream.write_all(&order.seed.to_le_bytes())?;
    check(stream, order)
}

fn check(stream: VsockStream, order: Order) -> io::Result<()> {
    let until = Instant::now() + Duration::from_millis(order.millis);
    let writer = stream.try_clone()?;
    let written = spawn(move || write_pattern(writer, order, until))?;
    let (read, ended, wrong) = read_pattern(&stream, order, until);
    let written = written.join().map_err(|_| io::Error::other("the writer failed"))?;
    drop(stream);
    let report = Report { seed: order.seed, read, written, ended, wrong };
    connect(REPORTS)?.write_all(&report.to_bytes())
}

/// Dials the host, which may have more waiting connections than it likes, or be slow.
fn connect(port: u32) -> io::Result<VsockStream> {
    let mut tries = 0;
    loop {
        match VsockStream::connect_with_cid_port(VMADDR_CID_HOST, port) {
            Err(_) if tries < 100 => thread::sleep(Duration::from_millis(100)),
            result => return result,
        }
        tries += 1;
    }
}

/// Returns how many bytes were written.
fn write_pattern(mut stream: VsockStream, order: Order, until: Instant) -> u64 {
    let mut pattern = Pattern::of_guest(order.seed);
    let mut sizes = Sizes::new(order.seed);
    let mut buffer = vec![0; Sizes::MOST];
    while Instant::now() < until {
        let part = &mut buffer[..sizes.next()];
        pattern.fill(part);
        let mut left = &*part;
        while !left.is_empty() {
            match stream.write(left) {
                Ok(count) => left = &left[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The host has closed.
                Err(_) => {
                    let rest = left.len();
                    pattern.rewind(rest);
                    return pattern.position();
                }
            }
        }
    }
    if order.size != ABORT {
        let _ = stream.shutdown(Shutdown::Write);
    }
    pattern.position()
}

/// Returns how many bytes came, whether the stream ended, and whether a byte was wrong.
fn read_pattern(mut stream: &VsockStream, order: Order, until: Instant) -> (u64, bool, bool) {
    let mut pattern = Pattern::of_host(order.seed);
    let mut buffer = vec![0; READ];
    if order.size == ABORT {
        let _ = stream.set_read_timeout(Some(Duration::from_millis(100)));
    }
    while order.size != ABORT || Instant::now() < until {
        match stream.read(&mut buffer) {
            Ok(0) => return (pattern.position(), true, false),
            Ok(count) if pattern.check(&buffer[..count]) => {}
            Ok(_) => return (pattern.position(), false, true),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                ) => {}
            Err(_) => break,
        }
    }
    (pattern.position(), false, false)
}

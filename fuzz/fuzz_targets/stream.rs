//! Frames of bulk streams, which both the host and the agent read from the other.
#![no_main]

use arbitrary::Arbitrary;
use casulo_fuzz::limits::Limits;
use casulo_fuzz::program::Data;
use casulo_protocol::stream::{Channel, Decoder, Frame, FrameError};

#[derive(Arbitrary, Debug)]
struct Program {
    parts: Vec<Part>,
    /// The bytes arrive in pieces of these sizes, in turns.
    pieces: Vec<u8>,
}

#[derive(Arbitrary, Debug)]
enum Part {
    Frame(Kind),
    /// A header of any content, and what follows it.
    Header {
        kind: u8,
        channel: u8,
        reserved: u8,
        length: u32,
        data: Data,
    },
    Bytes(Vec<u8>),
}

#[derive(Arbitrary, Debug)]
enum Kind {
    Open(u64),
    Data(u8, Data),
    End(u8),
    Reset(u8),
    WindowSize(u16, u16),
    Signal(u32),
    Exit(u32),
}

fn channel(number: u8) -> Channel {
    [Channel::Stdin, Channel::Stdout, Channel::Stderr][usize::from(number % 3)]
}

fn encode(part: &Part, out: &mut Vec<u8>) {
    let frame = match part {
        Part::Bytes(bytes) => return out.extend(bytes),
        Part::Header { kind, channel, reserved, length, data } => {
            out.extend([*kind, *channel, *reserved & 1, 0]);
            out.extend(length.to_le_bytes());
            return out.extend(data.bytes());
        }
        Part::Frame(kind) => match kind {
            Kind::Open(token) => Frame::Open(*token),
            Kind::Data(number, data) => Frame::Data(channel(*number), data.bytes()),
            Kind::End(number) => Frame::End(channel(*number)),
            Kind::Reset(number) => Frame::Reset(channel(*number)),
            Kind::WindowSize(rows, columns) => Frame::WindowSize(*rows, *columns),
            Kind::Signal(signal) => Frame::Signal(*signal),
            Kind::Exit(status) => Frame::Exit(*status),
        },
    };
    frame.encode(out);
}

/// The frames of bytes that arrive in these pieces, and the error that ends them.
fn decode<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> (Vec<Frame>, Option<FrameError>) {
    let (mut decoder, mut frames) = (Decoder::new(), Vec::new());
    for piece in pieces {
        decoder.feed(piece);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => return (frames, Some(error)),
            }
        }
    }
    (frames, None)
}

libfuzzer_sys::fuzz_target!(|program: Program| {
    let mut bytes = Vec::new();
    for part in program.parts.iter().take(64) {
        encode(part, &mut bytes);
    }
    let limits = Limits::new();
    let whole = decode(std::iter::once(bytes.as_slice()));

    let mut rest = bytes.as_slice();
    let mut sizes = program.pieces.iter().map(|size| usize::from(*size) + 1).cycle();
    let pieces = std::iter::from_fn(|| {
        let size = sizes.next().unwrap_or(usize::MAX).min(rest.len());
        let (piece, tail) = rest.split_at(size);
        rest = tail;
        (!piece.is_empty()).then_some(piece)
    });
    assert_eq!(decode(pieces), whole, "pieces make no difference");

    // There is one way to write a frame.
    let mut again = Vec::new();
    whole.0.iter().for_each(|frame| frame.encode(&mut again));
    assert!(bytes.starts_with(&again));
    drop((whole, again));
    limits.check();
});

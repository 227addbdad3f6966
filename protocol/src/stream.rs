//! Frames of a bulk stream: stdin, stdout, stderr and terminals.
//!
//! A frame is a header of eight bytes, then its payload:
//!
//! | bytes | content                                         |
//! |-------|-------------------------------------------------|
//! | 0     | kind                                            |
//! | 1     | channel for data, end and reset, else 0         |
//! | 2..4  | 0                                               |
//! | 4..8  | length of the payload, little endian, at most [`MAX_PAYLOAD`] |
//!
//! The side that opens the stream sends [`Frame::Open`] first. Each channel carries data in one
//! direction and ends once, by `End` or `Reset`. Back-pressure is that of the transport.

/// Bytes of a header.
pub const HEADER: usize = 8;
/// Most bytes of a payload.
pub const MAX_PAYLOAD: usize = 256 * 1024;

/// Which bytes a data frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Channel {
    /// Host to guest.
    Stdin = 0,
    /// Guest to host; a terminal's output too.
    Stdout = 1,
    /// Guest to host.
    Stderr = 2,
}

impl Channel {
    fn from_byte(byte: u8) -> Result<Self, FrameError> {
        match byte {
            0 => Ok(Self::Stdin),
            1 => Ok(Self::Stdout),
            2 => Ok(Self::Stderr),
            other => Err(FrameError::Channel(other)),
        }
    }
}

/// One frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// First frame: the token under which the call names the stream.
    Open(u64),
    /// Bytes of a channel.
    Data(Channel, Vec<u8>),
    /// No more bytes on a channel.
    End(Channel),
    /// The reader of a channel is gone: stop sending.
    Reset(Channel),
    /// The terminal has a new size: rows, columns.
    WindowSize(u16, u16),
    /// Send this signal to the command's foreground processes.
    Signal(u32),
    /// The command ended with this wait status (`waitpid`); the last frame from the guest.
    Exit(u32),
}

/// A stream that breaks the format. It cannot be used further.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Unknown kind.
    #[error("unknown frame kind {0}")]
    Kind(u8),
    /// Unknown channel.
    #[error("unknown stream channel {0}")]
    Channel(u8),
    /// Payload longer than allowed, or not as long as its kind wants.
    #[error("frame of kind {kind} has a payload of {length} bytes")]
    Length {
        /// Kind byte.
        kind: u8,
        /// Length in the header.
        length: u32,
    },
    /// Reserved bytes are not zero.
    #[error("reserved bytes of a frame header are not zero")]
    Reserved,
}

const OPEN: u8 = 1;
const DATA: u8 = 2;
const END: u8 = 3;
const RESET: u8 = 4;
const WINDOW_SIZE: u8 = 5;
const SIGNAL: u8 = 6;
const EXIT: u8 = 7;

fn header(kind: u8, channel: u8, length: u32) -> [u8; HEADER] {
    let l = length.to_le_bytes();
    [kind, channel, 0, 0, l[0], l[1], l[2], l[3]]
}

/// Header of a data frame, for writers that send the payload from where it lies.
///
/// # Errors
/// `Length` when `length` is over [`MAX_PAYLOAD`].
pub fn data_header(channel: Channel, length: usize) -> Result<[u8; HEADER], FrameError> {
    match u32::try_from(length) {
        Ok(l) if length <= MAX_PAYLOAD => Ok(header(DATA, channel as u8, l)),
        _ => Err(FrameError::Length { kind: DATA, length: u32::MAX }),
    }
}

impl Frame {
    /// Appends the frame to `out`. Data beyond [`MAX_PAYLOAD`] is split into several frames.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Open(token) => {
                out.extend(header(OPEN, 0, 8));
                out.extend(token.to_le_bytes());
            }
            Self::Data(channel, data) => {
                for part in data.chunks(MAX_PAYLOAD) {
                    // A chunk is at most MAX_PAYLOAD bytes, so this never fails.
                    if let Ok(head) = data_header(*channel, part.len()) {
                        out.extend(head);
                        out.extend(part);
                    }
                }
            }
            Self::End(channel) => out.extend(header(END, *channel as u8, 0)),
            Self::Reset(channel) => out.extend(header(RESET, *channel as u8, 0)),
            Self::WindowSize(rows, columns) => {
                out.extend(header(WINDOW_SIZE, 0, 4));
                out.extend(rows.to_le_bytes());
                out.extend(columns.to_le_bytes());
            }
            Self::Signal(signal) => {
                out.extend(header(SIGNAL, 0, 4));
                out.extend(signal.to_le_bytes());
            }
            Self::Exit(status) => {
                out.extend(header(EXIT, 0, 4));
                out.extend(status.to_le_bytes());
            }
        }
    }
}

/// Turns bytes as they arrive into frames. Holds at most one frame beyond what was fed last.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    read: usize,
}

impl Decoder {
    /// An empty decoder.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes from the stream.
    pub fn feed(&mut self, bytes: &[u8]) {
        if self.read > 0 {
            self.buffer.drain(..self.read);
            self.read = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Whether the bytes fed so far end between two frames.
    pub fn is_empty(&self) -> bool {
        self.read == self.buffer.len()
    }

    /// The next whole frame; `None` when more bytes are needed.
    ///
    /// # Errors
    /// The bytes break the format.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let pending = self.buffer.get(self.read..).unwrap_or_default();
        let Some((head, rest)) = pending.split_first_chunk::<HEADER>() else { return Ok(None) };
        let [kind, channel, r0, r1, l0, l1, l2, l3] = *head;
        if r0 != 0 || r1 != 0 {
            return Err(FrameError::Reserved);
        }
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        let bad = FrameError::Length { kind, length };
        let wanted = match kind {
            OPEN => 8,
            DATA if length >= 1 => length,
            END | RESET => 0,
            WINDOW_SIZE | SIGNAL | EXIT => 4,
            DATA => return Err(bad),
            other => return Err(FrameError::Kind(other)),
        };
        let size = usize::try_from(length).unwrap_or(usize::MAX);
        if length != wanted || size > MAX_PAYLOAD {
            return Err(bad);
        }
        if !matches!(kind, DATA | END | RESET) && channel != 0 {
            return Err(FrameError::Channel(channel));
        }
        let Some(payload) = rest.get(..size) else { return Ok(None) };
        let word = || payload.first_chunk::<4>().map(|b| u32::from_le_bytes(*b)).ok_or(bad.clone());
        let frame = match kind {
            OPEN => Frame::Open(
                payload.first_chunk::<8>().map(|b| u64::from_le_bytes(*b)).ok_or(bad.clone())?,
            ),
            DATA => Frame::Data(Channel::from_byte(channel)?, payload.to_vec()),
            END => Frame::End(Channel::from_byte(channel)?),
            RESET => Frame::Reset(Channel::from_byte(channel)?),
            WINDOW_SIZE => {
                let [a, b, c, d] = *payload.first_chunk::<4>().ok_or(bad.clone())?;
                Frame::WindowSize(u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]))
            }
            SIGNAL => Frame::Signal(word()?),
            _ => Frame::Exit(word()?),
        };
        self.read += HEADER + size;
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode_all(decoder: &mut Decoder) -> Result<Vec<Frame>, FrameError> {
        let mut frames = Vec::new();
        while let Some(frame) = decoder.next_frame()? {
            frames.push(frame);
        }
        Ok(frames)
    }

    fn any_frame() -> impl Strategy<Value = Frame> {
        let channel =
            prop_oneof![Just(Channel::Stdin), Just(Channel::Stdout), Just(Channel::Stderr)];
        prop_oneof![
            any::<u64>().prop_map(Frame::Open),
            (channel.clone(), proptest::collection::vec(any::<u8>(), 1..600))
                .prop_map(|(c, d)| Frame::Data(c, d)),
            channel.clone().prop_map(Frame::End),
            channel.prop_map(Frame::Reset),
            any::<(u16, u16)>().prop_map(|(r, c)| Frame::WindowSize(r, c)),
            any::<u32>().prop_map(Frame::Signal),
            any::<u32>().prop_map(Frame::Exit),
        ]
    }

    proptest! {
        #[test]
        fn frames_survive_any_splitting(
            frames in proptest::collection::vec(any_frame(), 0..20),
            sizes in proptest::collection::vec(1usize..64, 1..10),
        ) {
            let mut bytes = Vec::new();
            for frame in &frames {
                frame.encode(&mut bytes);
            }
            let mut decoder = Decoder::new();
            let mut decoded = Vec::new();
            let mut rest = bytes.as_slice();
            for size in sizes.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (part, tail) = rest.split_at((*size).min(rest.len()));
                decoder.feed(part);
                decoded.extend(decode_all(&mut decoder).unwrap());
                rest = tail;
            }
            prop_assert!(decoder.is_empty());
            prop_assert_eq!(decoded, frames);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..4096)) {
            let mut decoder = Decoder::new();
            decoder.feed(&bytes);
            let _ = decode_all(&mut decoder);
        }
    }

    #[test]
    fn long_data_is_split() {
        let data = vec![7; MAX_PAYLOAD * 2 + 1];
        let mut bytes = Vec::new();
        Frame::Data(Channel::Stdout, data.clone()).encode(&mut bytes);
        let mut decoder = Decoder::new();
        decoder.feed(&bytes);
        let frames = decode_all(&mut decoder).unwrap();
        assert_eq!(frames.len(), 3);
        let joined: Vec<u8> = frames
            .into_iter()
            .flat_map(|f| match f {
                Frame::Data(Channel::Stdout, d) => d,
                other => panic!("unexpected {other:?}"),
            })
            .collect();
        assert_eq!(joined, data);
    }

    #[test]
    fn oversized_and_unknown_frames_are_errors() {
        for (bytes, error) in [
            ([DATA, 1, 0, 0, 1, 0, 4, 0], FrameError::Length { kind: DATA, length: 0x4_0001 }),
            ([DATA, 1, 0, 0, 0, 0, 0, 0], FrameError::Length { kind: DATA, length: 0 }),
            ([99, 0, 0, 0, 0, 0, 0, 0], FrameError::Kind(99)),
            ([END, 9, 0, 0, 0, 0, 0, 0], FrameError::Channel(9)),
            ([END, 1, 1, 0, 0, 0, 0, 0], FrameError::Reserved),
            ([EXIT, 0, 0, 0, 8, 0, 0, 0], FrameError::Length { kind: EXIT, length: 8 }),
        ] {
            let mut decoder = Decoder::new();
            decoder.feed(&bytes);
            assert_eq!(decoder.next_frame(), Err(error));
        }
    }
}

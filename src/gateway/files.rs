//! `read_file`, `write_file` and `list_files`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use casulo_protocol::agent::{FileContent, ListFiles, ReadFile, WriteFile};
use casulo_protocol::error::TaskError;
use casulo_protocol::spec::OUTPUT_PATH;
use rmcp::model::{CallToolResult, ContentBlock};

use super::render::{self, Budget};
use super::sandboxes::Call;
use super::server::{Context, Server, internal, invalid};
use super::tools::args::{Encoding, ListFilesArgs, ReadFileArgs, WriteFileArgs};
use super::tools::results::{ReadFileResult, WriteFileResult};
use crate::text;

/// Largest image that is given as one, in bytes.
pub(super) const MAX_IMAGE: u64 = 1 << 20;
/// Bytes by which images are told apart.
const MAGIC: u64 = 16;

impl Server {
    pub(super) async fn read_file(
        &self,
        args: ReadFileArgs,
        context: &Context,
    ) -> Result<CallToolResult, TaskError> {
        let budget = self.budget(args.max_output_bytes, args.raw)?;
        let call = self.sandboxes.get(&self.caller, &args.sandbox_id)?;
        context
            .or_cancelled(async {
                let limit = u64::from(args.limit).max(MAGIC);
                let (content, mut data) = read(&call, &args.path, args.offset, limit).await?;
                if args.encoding == Encoding::Utf8
                    && args.offset == 0
                    && let Some(kind) = image(&data)
                {
                    return whole_image(&call, &args.path, kind, content.size).await;
                }
                data.truncate(usize::try_from(args.limit).unwrap_or(usize::MAX));
                render::both(&part(&args, &data, content.size, budget))
            })
            .await
    }

    pub(super) async fn write_file(
        &self,
        args: WriteFileArgs,
        context: &Context,
    ) -> Result<CallToolResult, TaskError> {
        let data = match args.encoding {
            Encoding::Utf8 => STANDARD.encode(&args.content),
            Encoding::Base64 => {
                STANDARD
                    .decode(&args.content)
                    .map_err(|error| invalid(format!("content is no base64: {error}")))?;
                args.content
            }
        };
        let mode = match args.mode.as_str() {
            "" => None,
            octal => Some(
                u32::from_str_radix(octal, 8)
                    .map_err(|error| invalid(format!("mode is no octal number: {error}")))?,
            ),
        };
        let call = self.sandboxes.get(&self.caller, &args.sandbox_id)?;
        let request = WriteFile { path: args.path, data, append: args.append, mode };
        let answer = context
            .or_cancelled(async { call.sandbox.write_file(request).await.map_err(TaskError::from) })
            .await?;
        render::both(&WriteFileResult { size: answer.size })
    }

    pub(super) async fn list_files(
        &self,
        args: ListFilesArgs,
        context: &Context,
    ) -> Result<CallToolResult, TaskError> {
        let budget = self.budget(super::limits::DEFAULT_OUTPUT_BYTES, false)?;
        let call = self.sandboxes.get(&self.caller, &args.sandbox_id)?;
        let path = if args.path.is_empty() { OUTPUT_PATH.to_owned() } else { args.path };
        let request = ListFiles { path, recursive: args.recursive, limit: u64::from(args.limit) };
        let mut answer = context
            .or_cancelled(async { call.sandbox.list_files(request).await.map_err(TaskError::from) })
            .await?;
        // The guest may ignore the limit.
        let limit = usize::try_from(args.limit).unwrap_or(usize::MAX);
        answer.truncated |= answer.entries.len() > limit;
        answer.entries.truncate(limit);
        for entry in &mut answer.entries {
            entry.path = text::safe(&entry.path);
            entry.kind = text::safe(&entry.kind);
        }
        while !budget.fits(&answer) && !answer.entries.is_empty() {
            answer.entries.truncate(answer.entries.len() / 8 * 7);
            answer.truncated = true;
        }
        render::both(&answer)
    }
}

/// Reads part of a file; the guest's answer is checked.
async fn read(
    call: &Call,
    path: &str,
    offset: u64,
    limit: u64,
) -> Result<(FileContent, Vec<u8>), TaskError> {
    let request = ReadFile { path: path.to_owned(), offset, limit };
    let answer = call.sandbox.read_file(request).await.map_err(TaskError::from)?;
    let data = STANDARD
        .decode(&answer.data)
        .map_err(|_| internal("the guest's answer is no base64; destroy this sandbox"))?;
    if u64::try_from(data.len()).unwrap_or(u64::MAX) > limit {
        return Err(internal("the guest sent more than was asked for; destroy this sandbox"));
    }
    Ok((answer, data))
}

/// What was read, as far as it fits.
fn part(args: &ReadFileArgs, data: &[u8], size: u64, budget: Budget) -> ReadFileResult {
    // The rest of the object is some hundred bytes.
    let room = budget.bytes().saturating_sub(256);
    let (content, taken) = match args.encoding {
        Encoding::Utf8 => {
            // A character that goes on beyond the part is left to the next one.
            let more = args.offset.saturating_add(u64::try_from(data.len()).unwrap_or(0)) < size;
            let whole = if more { render::whole_end(data) } else { data };
            render::prefix(if whole.is_empty() { data } else { whole }, room, budget.raw())
        }
        Encoding::Base64 => {
            // Whole groups of three bytes give four characters.
            let taken = data.len().min(room / 4 * 3);
            (STANDARD.encode(data.get(..taken).unwrap_or_default()), taken)
        }
    };
    let next_offset = args.offset.saturating_add(u64::try_from(taken).unwrap_or(u64::MAX));
    let end = taken == data.len() && next_offset >= size;
    ReadFileResult { content, encoding: args.encoding, size, next_offset, end }
}

/// Media type of an image by its first bytes.
fn image(data: &[u8]) -> Option<&'static str> {
    match data {
        [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some("image/png"),
        [0xff, 0xd8, 0xff, ..] => Some("image/jpeg"),
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some("image/gif"),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some("image/webp"),
        _ => None,
    }
}

async fn whole_image(
    call: &Call,
    path: &str,
    kind: &str,
    size: u64,
) -> Result<CallToolResult, TaskError> {
    if size > MAX_IMAGE {
        return Err(invalid(format!(
            "{path} is an image of {size} bytes; at most {MAX_IMAGE} can be shown: make it smaller, \
             or read it with encoding base64"
        )));
    }
    let (answer, _) = read(call, path, 0, MAX_IMAGE).await?;
    Ok(CallToolResult::success(vec![ContentBlock::image(answer.data, kind)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(encoding: &str, offset: u64, raw: bool) -> ReadFileArgs {
        serde_json::from_value(serde_json::json!({
            "sandbox_id": "sb", "path": "a", "encoding": encoding, "offset": offset, "raw": raw,
        }))
        .unwrap()
    }

    #[test]
    fn a_part_is_whole_within_the_budget_and_tells_where_to_go_on() {
        let budget = Budget::new(2048, false);
        let small = part(&args("utf-8", 10, false), b"abc", 13, budget);
        assert_eq!((small.content.as_str(), small.next_offset, small.end), ("abc", 13, true));
        for (encoding, data) in [
            ("utf-8", vec![b'x'; 5000]),
            ("utf-8", vec![1; 5000]),
            ("utf-8", "é".repeat(3000).into_bytes()),
            ("base64", vec![0xff; 5000]),
        ] {
            let one = part(&args(encoding, 0, false), &data, 5000, budget);
            assert!(budget.fits(&one), "{encoding}");
            assert!(!one.end && one.next_offset > 200 && one.next_offset < 5000, "{encoding}");
        }
    }

    #[test]
    fn paging_gives_the_bytes_of_the_file() {
        let data: Vec<u8> = (0..10_000u32).map(|n| (n * 7) as u8).collect();
        let (mut all, mut offset) = (Vec::new(), 0);
        loop {
            let rest = &data[offset..];
            let one =
                part(&args("base64", offset as u64, false), rest, 10_000, Budget::new(2048, false));
            all.extend(STANDARD.decode(one.content).unwrap());
            offset = usize::try_from(one.next_offset).unwrap();
            if one.end {
                break;
            }
        }
        assert_eq!(all, data);
    }

    #[test]
    fn text_is_safe_unless_raw_is_wanted() {
        let data = b"a\x1b[31m\xe2\x80\xae\0";
        let safe = part(&args("utf-8", 0, false), data, 10, Budget::new(2048, false));
        assert_eq!(safe.content, "a\\u{202e}\\u{0}");
        let raw = part(&args("utf-8", 0, true), data, 10, Budget::new(2048, true));
        assert_eq!(raw.content, "a\u{1b}[31m\u{202e}\0");
    }

    #[test]
    fn images_are_known_by_their_first_bytes() {
        assert_eq!(image(b"\x89PNG\r\n\x1a\n...."), Some("image/png"));
        assert_eq!(image(b"\xff\xd8\xff\xe0"), Some("image/jpeg"));
        assert_eq!(image(b"GIF89a"), Some("image/gif"));
        assert_eq!(image(b"RIFF....WEBPVP8 "), Some("image/webp"));
        for other in [&b"GIF"[..], b"RIFF....WAVE", b"\x89PNG", b"<svg>", b""] {
            assert_eq!(image(other), None);
        }
    }
}

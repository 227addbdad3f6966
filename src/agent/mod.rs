//! The host's side of the guest agent. What the agent says comes from a guest that may be hostile:
//! it is bounded, parsed into types, and never trusted.

pub(crate) mod boot;
mod bounded;
pub(crate) mod exec;
pub(crate) mod mcp;

/// What to run in a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Program {
    /// The command of the [`RunSpec`](casulo_protocol::spec::RunSpec), after the image's entry point.
    Command,
    /// Source text for an interpreter of the image.
    Code {
        /// `python` or `bash`.
        language: String,
        /// The source.
        code: String,
    },
}

/// A sentence of the guest as it may appear in a message: bounded, without control characters, which
/// could drive the reader's terminal.
pub(crate) fn quote(text: &str) -> String {
    const MOST: usize = 2000;
    text.chars()
        .take(MOST)
        .map(|c| match c {
            '\n' | '\t' => c,
            c if c.is_control() => '?',
            c => c,
        })
        .collect()
}

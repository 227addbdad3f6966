//! The host's side of the guest agent. What the agent says comes from a guest that may be hostile:
//! it is bounded, parsed into types, and never trusted.

pub(crate) mod boot;
pub(crate) mod bounded;
pub(crate) mod exec;
pub(crate) mod mcp;
mod transport;

/// What to run in a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Program {
    /// The command of the [`RunSpec`](casulo_protocol::spec::RunSpec), after the image's entry point.
    Command,
    /// Source text for an interpreter of the image.
    Code {
        /// `python`, `bash` or `javascript`.
        language: String,
        /// The source.
        code: String,
    },
    /// Source text for the resident interpreter of its language, which keeps variables from call to
    /// call. The working folder and environment of the [`RunSpec`](casulo_protocol::spec::RunSpec)
    /// stay in force; the input is not that of the [`Stdio`](crate::Stdio).
    Session {
        /// `python`, `bash` or `javascript`.
        language: String,
        /// The source.
        code: String,
        /// Standard input.
        stdin: String,
    },
}

/// How a program is to be run, beside what it is.
#[derive(Clone, Debug, Default)]
pub struct Execution {
    /// Whether to look for changed files.
    pub files: crate::Files,
    /// Keep the whole of each output in a file of the guest.
    pub keep: Option<casulo_protocol::agent::Keep>,
}

/// A sentence of the guest as it may appear in a message: bounded, without characters that could drive
/// the reader's terminal or act unseen.
pub(crate) fn quote(text: &str) -> String {
    const MOST: usize = 2000;
    text.chars()
        .take(MOST)
        .map(|c| match c {
            '\n' | '\t' => c,
            c if crate::text::is_hidden(c) => '?',
            c => c,
        })
        .collect()
}

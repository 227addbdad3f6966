//! The Inspector's command line, in all its eras.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::LIMIT;
use super::calls::{Answer, Calls, Seen};
use super::server::Server;
use crate::npm::Packages;
use crate::sh;

const ERAS: [&str; 3] = ["legacy", "auto", "modern"];
/// Exit status when the tool's result is an error.
const TOOL_ERROR: i32 = 5;

/// Lists the tools with an eye on their schemas (`--strict`), and makes the calls that need no other,
/// over HTTP; over stdio it makes the first of them.
pub(super) fn run(
    npm: &Packages,
    casulo: &Path,
    server: &Server,
    calls: &Calls,
    seen: &Seen,
) -> Result<()> {
    for era in ERAS {
        eprintln!("Inspector {era}");
        let http = || {
            let mut command = inspector(npm);
            command.arg(server.url()).args(["--transport", "http", "--protocol-era", era]);
            command.args(["--header", &format!("Authorization: Bearer {}", server.token())]);
            command
        };
        let stdio = || {
            let mut command = inspector(npm);
            command.arg(casulo).arg("mcp").args(["--protocol-era", era]);
            // It may have to start an emulated host first.
            command.args(["--connect-timeout", "120000"]);
            command
        };
        sh::output_within(http().args(["--method", "tools/list", "--strict"]), LIMIT)
            .with_context(|| format!("Inspector {era}: tools/list --strict over HTTP"))?;
        let alone = calls.steps().iter().enumerate().filter(|(_, step)| step.stands_alone());
        for (place, (n, step)) in alone.enumerate() {
            let arguments = Value::from(step.arguments.clone()).to_string();
            let call = |mut command: Command| -> Result<()> {
                command.args(["--method", "tools/call", "--tool-name", &step.tool]);
                command.args(["--tool-args-json", &arguments, "--format", "json"]);
                let given = answer(&mut command)?;
                let got = step.judge(&given)?;
                let others = seen.of(n).context("no other client made this call")?;
                ensure!(&got == others, "other clients got {others}, the Inspector {got}");
                Ok(())
            };
            let name = |way| format!("Inspector {era} over {way}: {} {arguments}", step.tool);
            call(http()).with_context(|| name("HTTP"))?;
            if place == 0 {
                call(stdio()).with_context(|| name("stdio"))?;
            }
        }
    }
    Ok(())
}

fn inspector(npm: &Packages) -> Command {
    let mut command =
        npm.program("@modelcontextprotocol/inspector/clients/launcher/build/index.js");
    // Nothing of the user's is read or written.
    command.env("MCP_INSPECTOR_SECRET_STORE", "memory");
    command.args(["--cli", "-q"]);
    command
}

/// The result of a call, out of what the Inspector prints.
fn answer(command: &mut Command) -> Result<Answer> {
    let (status, printed) = sh::ended_within(command, LIMIT)?;
    let printed: Value = serde_json::from_str(&printed)
        .with_context(|| format!("{status}: no JSON: {printed:?}"))?;
    let result = &printed["result"];
    let is_error = result["isError"].as_bool().unwrap_or(false);
    let expected = if is_error { TOOL_ERROR } else { 0 };
    ensure!(status.code() == Some(expected), "{status}, and printed {printed}");
    let text = result["content"][0]["text"].as_str().context("no text in the result")?;
    let structured = result.get("structuredContent").cloned();
    Ok(Answer { structured, text: text.to_owned(), is_error })
}

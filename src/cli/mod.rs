//! The command `casulo`: a thin user of the library.

mod connect;
mod doctor;
mod ends;
mod host;
mod image;
mod limits;
mod mcp;
mod options;
mod run;
mod serve;
mod stdio;
mod terminal;
mod wrap;

use std::io::Write;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};

/// Exit status when Casulo itself failed.
const FAILED: u8 = 125;

/// Runs code that nobody has reviewed in a microVM that exists for one task.
#[derive(Parser, Debug)]
#[command(name = "casulo", version, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Run a command in a microVM of its own
    ///
    /// Standard input, output and error are the command's. The exit status is the command's own;
    /// 128+n when signal n ended it; 124 after a timeout; 125 when Casulo itself failed; 126 or 127
    /// when the command cannot be run or found.
    Run(Box<run::Args>),
    /// Serve MCP to one client on standard input and output
    ///
    /// Give it to an agent as the command of an MCP server. Sandboxes are made after these options
    /// and end with this process.
    Mcp(Box<mcp::Args>),
    /// Serve MCP over Streamable HTTP to several clients
    ///
    /// Sandboxes are made after the options of the microVM. Callers show a token and do not see each
    /// other's sandboxes.
    Serve(Box<serve::Args>),
    /// Run somebody else's MCP server in a microVM
    ///
    /// To the client on standard input and output this is that server, which sees only its image and
    /// the shares, and no network. Its tools are remembered at the first use; when they change, they
    /// are refused until --accept-tools accepts them.
    Wrap(Box<wrap::Args>),
    /// List and inspect images
    #[command(subcommand)]
    Image(image::Command),
    /// Tell what works here, and how to put right what does not
    Doctor {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Run any command in the emulated host
    #[command(hide = true)]
    EmulatedHost(crate::emulated::command::Args),
}

/// Runs the command line of this process; gives the exit status.
pub fn main() -> u8 {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            let asked = matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            // Nothing can be done about a terminal that does not take it.
            let _ = e.print();
            return if asked { 0 } else { FAILED };
        }
    };
    match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Mcp(args) => mcp::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Wrap(args) => wrap::run(&args),
        Command::Image(command) => image::run(&command),
        Command::Doctor { json } => doctor::run(json),
        Command::EmulatedHost(args) => match crate::emulated::command::run(args, &host::home()) {
            Ok(status) => crate::emulated::command::exit_code(status),
            Err(e) => {
                complain(&e.to_string());
                FAILED
            }
        },
    }
}

/// Casulo's own words, on standard error.
fn complain(text: &str) {
    // Nothing can be done about a standard error that is closed.
    let _ = writeln!(std::io::stderr(), "casulo: {text}");
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn options_end_at_the_first_word_that_is_none() {
        for line in [
            &["casulo", "run", "--cpus", "2", "ls", "--help", "--cpus", "3"][..],
            &["casulo", "run", "--cpus", "2", "--", "ls", "--help", "--cpus", "3"][..],
        ] {
            let cli = Cli::try_parse_from(line).unwrap();
            let text = format!("{cli:?}");
            assert!(text.contains(r#"argv: ["ls", "--help", "--cpus", "3"]"#), "{text}");
            assert!(text.contains("cpus: 2"), "{text}");
        }
        assert!(Cli::try_parse_from(["casulo", "run"]).is_err());
    }

    #[test]
    fn a_connection_has_no_sandboxes_of_its_own() {
        let parse = |words: &[&str]| Cli::try_parse_from([&["casulo", "mcp"], words].concat());
        assert!(parse(&["--connect", "unix:/run/x"]).is_ok());
        assert!(parse(&["--connect", "unix:/run/x", "--memory", "1024"]).is_err());
        assert!(parse(&["--connect", "unix:/run/x", "--max-sandboxes", "2"]).is_err());
        assert!(parse(&["--token-file", "x"]).is_err());
        assert!(parse(&["--memory", "1024"]).is_ok());
    }

    #[test]
    fn a_server_in_a_sandbox_that_is_there_has_no_microvm_of_its_own() {
        let parse = |words: &[&str]| {
            Cli::try_parse_from([&["casulo", "wrap"], words, &["--", "x"]].concat())
        };
        let kept = ["--sandbox", "sb_1"];
        let with = |more: &[&str]| parse(&[&kept, more].concat());
        assert!(with(&[]).is_ok() && with(&["--token-file", "x", "--caller", "y"]).is_ok());
        assert!(with(&["--connect", "unix:/run/x", "--env", "A=b", "--workdir", "/x"]).is_ok());
        for wrong in [
            &["--memory", "1024"][..],
            &["--image", "dev"],
            &["--output", "x"],
            &["--host", "native"],
            &["--user", "root"],
            &["--config", "x"],
        ] {
            assert!(with(wrong).is_err(), "{wrong:?}");
        }
        for alone in [&["--connect", "unix:/run/x"][..], &["--token-file", "x"], &["--plain-http"]]
        {
            assert!(parse(alone).is_err(), "{alone:?}");
        }
        assert!(parse(&["--memory", "1024"]).is_ok());
    }
}

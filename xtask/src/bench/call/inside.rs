//! The part of `bench call` that runs beside the microVMs.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::paths;

/// Calls that warm everything up.
const WARM: u32 = 3;
const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// Both ways of a client to the gateway.
pub(super) const WAYS: [&str; 2] = ["stdio", "HTTP"];

/// What is called: a name for it, the tool, its arguments, and whether in a kept sandbox.
pub(super) const WHATS: [(&str, &str, &str, bool); 4] = [
    ("tools/list", "", "{}", false),
    ("empty run_command, kept sandbox", "run_command", r#"{"command": "true"}"#, true),
    (
        "least execute_code, kept sandbox",
        "execute_code",
        r#"{"language": "python", "code": "0"}"#,
        true,
    ),
    ("empty run_command, fresh sandbox", "run_command", r#"{"command": "true"}"#, false),
];

/// Options.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to do, as JSON
    plan: PathBuf,
}

/// What is to be measured.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) casulo: PathBuf,
    pub(super) home: PathBuf,
    pub(super) runs: u32,
}

/// One figure; a line on standard output.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Measured {
    pub(super) way: String,
    pub(super) what: String,
    /// Nanoseconds of each call.
    pub(super) times: Vec<u64>,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let plan = std::fs::read(&args.plan)
        .with_context(|| format!("cannot read {}", args.plan.display()))?;
    let plan: Plan = serde_json::from_slice(&plan)?;
    for way in WAYS {
        let mut client: Box<dyn Client> = match way {
            "stdio" => Box::new(Pipes::start(&plan)?),
            _ => Box::new(Http::start(&plan)?),
        };
        let sandbox = call(client.as_mut(), "create_sandbox", json!({}))?;
        let sandbox = sandbox["structuredContent"]["sandbox_id"].clone();
        for (what, tool, arguments, kept) in WHATS {
            let mut arguments: Value = serde_json::from_str(arguments)?;
            if kept {
                arguments["sandbox_id"] = sandbox.clone();
            }
            let mut times = Vec::new();
            for n in 0..WARM.saturating_add(plan.runs) {
                let begin = Instant::now();
                let result = call(client.as_mut(), tool, arguments.clone())?;
                let time = u64::try_from(begin.elapsed().as_nanos())?;
                ensure!(result["isError"] != true, "{what}: {result}");
                ensure!(
                    tool.is_empty() || result["structuredContent"]["exit_code"] == 0,
                    "{result}"
                );
                if n >= WARM {
                    times.push(time);
                }
            }
            let row = Measured { way: way.to_owned(), what: what.to_owned(), times };
            let mut line = serde_json::to_string(&row)?;
            line.push('\n');
            std::io::stdout().write_all(line.as_bytes())?;
        }
    }
    Ok(())
}

/// The result of a call, or of `tools/list` when no tool is named.
fn call(client: &mut dyn Client, tool: &str, arguments: Value) -> Result<Value> {
    let meta = json!({
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    });
    let (method, params) = match tool {
        "" => ("tools/list", json!({"_meta": meta})),
        tool => ("tools/call", json!({"name": tool, "arguments": arguments, "_meta": meta})),
    };
    let request = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
    let answer = client.exchange(&request.to_string(), method, tool)?;
    let answer: Value = serde_json::from_slice(&answer).context("the answer is no JSON")?;
    match answer.get("result") {
        Some(result) => Ok(result.clone()),
        None => bail!("no result: {answer}"),
    }
}

/// Somebody who sends a request and waits for its answer.
trait Client {
    fn exchange(&mut self, request: &str, method: &str, tool: &str) -> Result<Vec<u8>>;
}

/// A server that ends with its client.
struct Server(Child);

impl Server {
    fn start(plan: &Plan, arguments: &[&str], set: impl FnOnce(&mut Command)) -> Result<Self> {
        let mut command = Command::new(&plan.casulo);
        command.args(arguments).args(["--host", "native", "--memory", "128"]);
        command.env("CASULO_HOME", &plan.home);
        set(&mut command);
        Ok(Self(command.spawn().context("cannot start casulo")?))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `casulo mcp`.
struct Pipes {
    _server: Server,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Pipes {
    fn start(plan: &Plan) -> Result<Self> {
        let mut server = Server::start(plan, &["mcp"], |command| {
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
        })?;
        let input = server.0.stdin.take().context("no standard input")?;
        let output = BufReader::new(server.0.stdout.take().context("no standard output")?);
        Ok(Self { _server: server, input, output })
    }
}

impl Client for Pipes {
    fn exchange(&mut self, request: &str, _method: &str, _tool: &str) -> Result<Vec<u8>> {
        self.input.write_all(format!("{request}\n").as_bytes())?;
        let mut line = Vec::new();
        self.output.read_until(b'\n', &mut line)?;
        Ok(line)
    }
}

/// `casulo serve`, through one connection that stays open.
struct Http {
    _server: Server,
    _folder: tempfile::TempDir,
    stream: BufReader<TcpStream>,
}

impl Http {
    fn start(plan: &Plan) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let tokens = folder.path().join("tokens");
        paths::write_private(&tokens, &format!("bench {TOKEN}\n"))?;
        let mut server = Server::start(plan, &["serve", "--listen", "127.0.0.1:0"], |command| {
            command.arg("--token-file").arg(&tokens).stderr(Stdio::piped());
            command.args(["--max-calls-per-minute", "1000000"]);
        })?;
        let lines = BufReader::new(server.0.stderr.take().context("no standard error")?).lines();
        let address = lines.map_while(Result::ok).find_map(|line| {
            let (_, url) = line.split_once("serving MCP at http://")?;
            url.split('/').next().map(str::to_owned)
        });
        let address = address.context("casulo serve does not serve")?;
        let stream = TcpStream::connect(&address)?;
        stream.set_nodelay(true)?;
        Ok(Self { _server: server, _folder: folder, stream: BufReader::new(stream) })
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        ensure!(self.stream.read_line(&mut line)? > 0, "the server closed the connection");
        Ok(line.trim_end().to_owned())
    }
}

impl Client for Http {
    fn exchange(&mut self, request: &str, method: &str, tool: &str) -> Result<Vec<u8>> {
        let name = if tool.is_empty() { String::new() } else { format!("Mcp-Name: {tool}\r\n") };
        let head = format!(
            "POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\
             Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n\
             MCP-Protocol-Version: 2026-07-28\r\nMcp-Method: {method}\r\n{name}\
             Content-Length: {}\r\n\r\n{request}",
            request.len()
        );
        self.stream.get_mut().write_all(head.as_bytes())?;
        let status = self.line()?;
        let mut chunked = false;
        loop {
            let line = self.line()?.to_ascii_lowercase();
            chunked |= line == "transfer-encoding: chunked";
            if line.is_empty() {
                break;
            }
        }
        ensure!(status.contains(" 200 ") && chunked, "the server answers {status:?}");
        let mut body = Vec::new();
        loop {
            let size = usize::from_str_radix(&self.line()?, 16).context("no size of a chunk")?;
            let mut chunk = vec![0; size];
            self.stream.read_exact(&mut chunk)?;
            body.extend(chunk);
            ensure!(self.line()?.is_empty(), "a chunk is longer than it says");
            if size == 0 {
                break;
            }
        }
        // Events; the last one with data is the answer.
        let body = String::from_utf8(body)?;
        let data = body.lines().rev().find_map(|line| line.strip_prefix("data: {"));
        Ok(format!("{{{}", data.context("no answer among the events")?).into_bytes())
    }
}

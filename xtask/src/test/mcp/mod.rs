//! MCP clients that nobody here wrote, each over stdio, HTTP and the bridge between them.
//!
//! Python and TypeScript clients make the calls of `tests/mcp/calls.json` and print what they got;
//! whether that is right, and the same for all, is judged here.

mod calls;
mod conformance;
mod inspector;
mod server;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result};

use calls::Calls;
use server::Server;

use crate::npm::Packages;
use crate::{paths, pip, sh};

/// Longest time of one client.
const LIMIT: Duration = Duration::from_secs(5 * 60);
/// Python packages with their dependencies, and the programs that drive them.
const PYTHON: [(&str, &str); 2] = [("mcp==1.30.0", "client_v1.py"), ("mcp==2.3.0", "client_v2.py")];
/// What `client_ts.mjs` can be: an SDK, or an era of its successor.
const TYPESCRIPT: [&str; 4] = ["v1", "legacy", "auto", "modern"];
/// Cases of text that tries to give orders to a model.
const INJECTION: &str = "agent-injection-bench==0.1.0";

/// A client's program, without the server to use.
struct Client {
    name: String,
    command: Box<dyn Fn() -> Command>,
    /// Whether it must agree on the newest revision wherever the server answers at once.
    modern: bool,
}

fn scripts() -> PathBuf {
    paths::root().join("tests/mcp")
}

/// Runs every client against `casulo mcp`, which finds its host itself, and `casulo serve`.
pub(super) fn run() -> Result<()> {
    let casulo = paths::root().join("target/release/casulo");
    let npm = Rc::new(Packages::install(&scripts().join("npm"))?);
    let calls = Calls::read(&scripts().join("calls.json"))?;
    let server = Server::start(&casulo)?;
    let mut seen = calls::Seen::default();
    for client in clients(&npm)? {
        let mut run = |way: &str, add: &dyn Fn(&mut Command)| {
            let mut command = (client.command)();
            add(command.env("CASULO_TOKEN", server.token()));
            let name = format!("{} over {way}", client.name);
            eprintln!("{name}");
            let text = sh::output_within(&mut command, LIMIT).with_context(|| name.clone())?;
            let got = calls.judge(&text).with_context(|| name.clone())?;
            // A server that first starts an emulated host answers the probe for the newer revision
            // too late, and is then taken for an older one.
            let newest = client.modern && way != "stdio";
            got.revision(newest).and_then(|()| seen.same(got)).with_context(|| name.clone())
        };
        run("HTTP", &|c| _ = c.arg(server.url()))?;
        run("the bridge", &|c| _ = c.arg(&casulo).args(["mcp", "--connect", server.url()]))?;
        run("stdio", &|c| _ = c.arg(&casulo).arg("mcp"))?;
    }
    inspector::run(&npm, &casulo, &server, &calls, &seen)?;
    injection(&casulo, &server)?;
    server.stop()?;
    conformance::run(&npm, &casulo)
}

fn clients(npm: &Rc<Packages>) -> Result<Vec<Client>> {
    let mut clients = Vec::new();
    for (package, program) in PYTHON {
        let packages = pip::install(package, true)?;
        clients.push(Client {
            name: format!("Python {package}"),
            command: Box::new(move || python(&packages, program)),
            modern: program == "client_v2.py",
        });
    }
    for era in TYPESCRIPT {
        let npm = Rc::clone(npm);
        clients.push(Client {
            name: format!("TypeScript {era}"),
            command: Box::new(move || {
                let mut node = npm.node();
                node.arg(scripts().join("client_ts.mjs")).arg(era);
                node
            }),
            modern: matches!(era, "auto" | "modern"),
        });
    }
    Ok(clients)
}

fn python(packages: &Path, program: &str) -> Command {
    let mut python = Command::new("python3");
    python.env("PYTHONPATH", packages).current_dir(paths::root()).arg(scripts().join(program));
    python
}

/// What a program prints, raises or names its files changes nothing in the gateway.
fn injection(casulo: &Path, server: &Server) -> Result<()> {
    eprintln!("{INJECTION} as the output of tools");
    let packages = pip::install(INJECTION, false)?;
    let mut python = python(&packages, "injection.py");
    python.arg(casulo).args(["mcp", "--connect", server.url()]);
    python.env("CASULO_TOKEN", server.token());
    sh::run_within(&mut python, LIMIT).context(INJECTION)
}

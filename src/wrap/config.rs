//! A file with several servers for `casulo wrap --config`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use casulo_protocol::spec::{OutputLinks, RunSpec, SandboxSpec, ShareSpec};
use serde::Deserialize;

use super::{Allowlist, DEFAULT_MAX_RESULT, DEFAULT_TIMEOUT, Place, ServerSpec};

/// Most servers of one file.
const MAX_SERVERS: usize = 32;
/// Longest name of a server.
const MAX_NAME: usize = 32;
/// Most bytes of the file.
const MAX_FILE: u64 = 1 << 20;

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{file}: {why}")]
pub struct ConfigError {
    file: PathBuf,
    why: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    server: Vec<Server>,
}

/// A `[[server]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Server {
    name: String,
    command: Vec<String>,
    image: Option<String>,
    tools: Option<Vec<String>>,
    timeout_seconds: Option<f64>,
    max_result: Option<usize>,
    #[serde(default)]
    raw: bool,
    cpus: Option<u8>,
    memory: Option<u32>,
    scratch: Option<u32>,
    max_processes: Option<u32>,
    input: Option<PathBuf>,
    output: Option<PathBuf>,
    output_limit: Option<u64>,
    output_files: Option<u64>,
    #[serde(default)]
    output_links: OutputLinks,
    #[serde(default)]
    input_live: bool,
    #[serde(default)]
    share: Vec<ShareSpec>,
    #[serde(default)]
    share_sensitive: bool,
    #[serde(default)]
    env: BTreeMap<String, String>,
    user: Option<String>,
    workdir: Option<String>,
}

/// Reads the servers of a file. Paths on the host are relative to its folder.
///
/// # Errors
/// It cannot be read, or what is in it makes no sense; the error names the place.
pub fn read(file: &Path) -> Result<Vec<ServerSpec>, ConfigError> {
    use std::io::Read;
    let failed = |why: String| ConfigError { file: file.to_owned(), why };
    let mut text = String::new();
    std::fs::File::open(file)
        .and_then(|open| open.take(MAX_FILE.saturating_add(1)).read_to_string(&mut text))
        .map_err(|error| failed(format!("cannot be read: {error}")))?;
    if u64::try_from(text.len()).unwrap_or(u64::MAX) > MAX_FILE {
        return Err(failed(format!("it has more than {MAX_FILE} bytes")));
    }
    let folder = file.parent().unwrap_or(Path::new(""));
    let folder =
        std::path::absolute(folder.join(".")).map_err(|error| failed(error.to_string()))?;
    parse(&text, &folder).map_err(failed)
}

fn parse(text: &str, folder: &Path) -> Result<Vec<ServerSpec>, String> {
    let file: File =
        toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())?;
    if file.server.is_empty() {
        return Err("there is no [[server]] in it".to_owned());
    }
    if file.server.len() > MAX_SERVERS {
        return Err(format!("there are {} servers; at most {MAX_SERVERS} fit", file.server.len()));
    }
    let mut names = BTreeSet::new();
    let mut servers = Vec::new();
    for server in file.server {
        let name = server.name.clone();
        if !names.insert(name.clone()) {
            return Err(format!("two servers have the name {name:?}"));
        }
        servers.push(server.spec(folder).map_err(|why| format!("server {name:?}: {why}"))?);
    }
    Ok(servers)
}

impl Server {
    fn spec(self, folder: &Path) -> Result<ServerSpec, String> {
        let letters = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let first = self.name.starts_with(|c: char| c.is_ascii_lowercase());
        if !first || self.name.len() > MAX_NAME || !self.name.chars().all(letters) {
            return Err(format!(
                "a name has 1 to {MAX_NAME} characters out of a-z 0-9 - and begins with a letter"
            ));
        }
        if self.command.first().is_none_or(String::is_empty) {
            return Err("there is no command".to_owned());
        }
        let timeout = match self.timeout_seconds {
            None => DEFAULT_TIMEOUT,
            Some(seconds) => Duration::try_from_secs_f64(seconds)
                .ok()
                .filter(|time| (0.001..=86_400.0).contains(&time.as_secs_f64()))
                .ok_or("timeout_seconds must be from 0.001 to 86400")?,
        };
        let max_result = self.max_result.unwrap_or(DEFAULT_MAX_RESULT);
        if !(1024..=8 << 20).contains(&max_result) {
            return Err("max_result must be from 1024 to 8388608".to_owned());
        }
        if self.tools.as_ref().is_some_and(Vec::is_empty) {
            return Err("tools is empty; leave it out to allow all of them".to_owned());
        }
        let tools = self.tools.unwrap_or_default();
        let mut sandbox = SandboxSpec::default();
        sandbox.image = self.image.unwrap_or(sandbox.image);
        sandbox.cpus = self.cpus.unwrap_or(sandbox.cpus);
        sandbox.memory_mib = self.memory.unwrap_or(sandbox.memory_mib);
        sandbox.scratch_mib = self.scratch;
        sandbox.max_processes = self.max_processes.unwrap_or(sandbox.max_processes);
        sandbox.input = self.input.map(|path| folder.join(path));
        sandbox.output = self.output.map(|path| folder.join(path));
        sandbox.output_limit = self.output_limit.unwrap_or(sandbox.output_limit);
        sandbox.output_files = self.output_files;
        sandbox.output_links = self.output_links;
        sandbox.input_live = self.input_live;
        sandbox.shares = self.share;
        for share in &mut sandbox.shares {
            share.host = folder.join(&share.host);
        }
        sandbox.share_sensitive = self.share_sensitive;
        let mut command = RunSpec::new(self.command);
        command.env = self.env;
        command.user = self.user;
        command.workdir = self.workdir;
        Ok(ServerSpec {
            name: self.name,
            place: Place::Own(Box::new(sandbox)),
            command,
            tools: Allowlist::new(tools.iter().map(String::as_str))?,
            timeout,
            max_result,
            raw: self.raw,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_names_servers_with_a_policy_each() {
        let text = r#"
            [[server]]
            name = "files"
            image = "node"
            command = ["mcp-server-filesystem", "/workspace/output"]
            output = "out"
            tools = ["read_*"]
            timeout_seconds = 1.5
            env = {A = "b"}
            share = [{host = "/data", guest = "/data"}, {host = "x", guest = "/x", writable = true}]

            [[server]]
            name = "b-2"
            command = ["x"]
        "#;
        let servers = parse(text, Path::new("/home/me")).unwrap();
        let sandbox = |n: usize| match &servers[n].place {
            Place::Own(sandbox) => sandbox.as_ref().clone(),
            other => panic!("{other:?}"),
        };
        let (files, its) = (&servers[0], sandbox(0));
        assert_eq!((files.name.as_str(), its.image.as_str()), ("files", "node"));
        assert_eq!(its.output.as_deref(), Some(Path::new("/home/me/out")));
        assert_eq!(its.shares[0].host, Path::new("/data"));
        assert_eq!(its.shares[1].host, Path::new("/home/me/x"));
        assert!(its.shares[1].writable);
        assert_eq!(files.timeout, Duration::from_millis(1500));
        assert_eq!(files.command.env["A"], "b");
        assert_eq!(sandbox(1), SandboxSpec::default());
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        let good = "[[server]]\nname = 'a'\ncommand = ['x']\n";
        for (text, wanted) in [
            (String::new(), "no [[server]]"),
            ("server = 1".into(), "line 1"),
            (format!("x = 1\n{good}"), "unknown field `x`"),
            (format!("{good}imagee = 'x'"), "unknown field `imagee`"),
            (format!("{good}cpus = 300"), "line 4"),
            ("[[server]]\nname = 'a'".into(), "missing field `command`"),
            ("[[server]]\nname = 'a'\ncommand = []".into(), "no command"),
            (format!("{good}{good}"), "two servers have the name \"a\""),
            (good.replace("'a'", "'a_b'"), "a-z 0-9 -"),
            (good.replace("'a'", "''"), "a-z 0-9 -"),
            (format!("{good}tools = []"), "tools is empty"),
            (format!("{good}tools = ['[']"), "server \"a\""),
            (format!("{good}timeout_seconds = 0"), "timeout_seconds"),
            (format!("{good}timeout_seconds = nan"), "timeout_seconds"),
            (format!("{good}max_result = 1"), "max_result"),
            (format!("{good}share = [{{host = 'x'}}]"), "guest"),
        ] {
            let error = parse(&text, Path::new("/")).unwrap_err();
            assert!(error.contains(wanted), "{error}");
        }
        let missing = read(Path::new("/nowhere/x.toml")).unwrap_err().to_string();
        assert!(missing.starts_with("/nowhere/x.toml: cannot be read"), "{missing}");
    }
}

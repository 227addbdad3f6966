//! What is to be executed: argument and environment lists, checked and in the form `execve` wants.

use std::collections::BTreeMap;
use std::ffi::{CString, OsString};
use std::os::unix::ffi::OsStringExt as _;

use casulo_protocol::agent::ExecOptions;
use casulo_protocol::spec::OUTPUT_PATH;

use super::user::User;

/// `PATH` of a command whose environment has none.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Why a command did not start, with the exit status a shell would give.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct StartError {
    /// 126: found, but it cannot be run; 127: not found.
    pub exit_code: i32,
    /// What and why.
    pub message: String,
}

impl StartError {
    /// Cannot be run.
    pub fn cannot_run(message: impl Into<String>) -> Self {
        Self { exit_code: 126, message: message.into() }
    }

    /// Not found.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self { exit_code: 127, message: message.into() }
    }
}

/// Everything `execve` needs, allocated before the fork.
#[derive(Clone, Debug)]
pub struct Command {
    /// Program as the caller wrote it, for messages.
    pub program: String,
    /// Paths to try in this order.
    pub candidates: Vec<CString>,
    /// Arguments, the program's name first.
    pub argv: Vec<CString>,
    /// `NAME=value`.
    pub envp: Vec<CString>,
    /// Working folder.
    pub cwd: CString,
}

impl Command {
    /// Checks and converts.
    ///
    /// # Errors
    /// Empty `argv`, a NUL byte, a bad variable name, or a working folder that is not absolute.
    pub fn new(argv: &[String], options: &ExecOptions, user: &User) -> Result<Self, StartError> {
        let Some(program) = argv.first().filter(|p| !p.is_empty()) else {
            return Err(StartError::not_found("no program is named"));
        };
        let cwd = if options.cwd.is_empty() { OUTPUT_PATH } else { options.cwd.as_str() };
        if !cwd.starts_with('/') {
            return Err(StartError::cannot_run(format!(
                "the working folder {cwd:?} is not an absolute path"
            )));
        }
        let env = environment(options, user);
        let path = env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
        let candidates = candidates(program, path);
        let mut envp = Vec::with_capacity(env.len());
        for (name, value) in &env {
            if name.is_empty() || name.contains('=') {
                return Err(StartError::cannot_run(format!(
                    "{name:?} is not a name of an environment variable"
                )));
            }
            envp.push(c_string(format!("{name}={value}"), "environment")?);
        }
        Ok(Self {
            program: program.clone(),
            candidates: candidates
                .into_iter()
                .map(|c| c_string(c, "program"))
                .collect::<Result<_, _>>()?,
            argv: argv
                .iter()
                .map(|a| c_string(a.as_str(), "argument list"))
                .collect::<Result<_, _>>()?,
            envp,
            cwd: c_string(cwd, "working folder")?,
        })
    }

    /// Words for an `execve` that failed with `errno`.
    pub fn exec_error(&self, errno: i32) -> StartError {
        let program = &self.program;
        match errno {
            libc::ENOENT | libc::ENOTDIR if program.contains('/') => StartError::not_found(
                format!("{program}: no such file, or its interpreter is missing"),
            ),
            libc::ENOENT | libc::ENOTDIR => {
                StartError::not_found(format!("{program}: command not found in PATH"))
            }
            libc::EACCES => StartError::cannot_run(format!("{program}: permission denied")),
            libc::E2BIG => StartError::cannot_run(format!(
                "{program}: the arguments and environment are too long"
            )),
            libc::ENOEXEC => StartError::cannot_run(format!("{program}: not an executable format")),
            other => {
                let error = std::io::Error::from_raw_os_error(other);
                StartError::cannot_run(format!("{program}: {error}"))
            }
        }
    }

    /// Words for a working folder that cannot be entered.
    pub fn cwd_error(&self, errno: i32) -> StartError {
        let error = std::io::Error::from_raw_os_error(errno);
        StartError::cannot_run(format!(
            "cannot enter the working folder {}: {error}",
            self.cwd.to_string_lossy()
        ))
    }
}

fn c_string(text: impl Into<Vec<u8>>, what: &str) -> Result<CString, StartError> {
    CString::new(text).map_err(|_| StartError::cannot_run(format!("the {what} has a NUL byte")))
}

fn environment(options: &ExecOptions, user: &User) -> BTreeMap<String, String> {
    let mut env = options.env.clone();
    let mut default = |name: &str, value: &str| {
        env.entry(name.to_owned()).or_insert_with(|| value.to_owned());
    };
    default("HOME", &user.home);
    default("USER", &user.name);
    default("LOGNAME", &user.name);
    default("SHELL", &user.shell);
    default("PATH", DEFAULT_PATH);
    if options.terminal.is_some() {
        default("TERM", "xterm-256color");
    }
    env
}

/// Paths under which a shell would look for `program`.
fn candidates(program: &str, path: &str) -> Vec<Vec<u8>> {
    if program.contains('/') {
        return vec![program.as_bytes().to_vec()];
    }
    path.split(':')
        .map(|folder| {
            // An empty element is the working folder.
            let folder = if folder.is_empty() { "." } else { folder };
            let mut candidate = OsString::from(folder).into_vec();
            candidate.push(b'/');
            candidate.extend_from_slice(program.as_bytes());
            candidate
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::user::resolve;

    fn command(argv: &[&str], options: &ExecOptions) -> Result<Command, StartError> {
        let user = resolve("", "u:x:1000:1000::/home/u:/bin/bash\n", "").unwrap();
        Command::new(&argv.iter().map(|a| (*a).to_owned()).collect::<Vec<_>>(), options, &user)
    }

    fn strings(list: &[CString]) -> Vec<&str> {
        list.iter().map(|c| c.to_str().unwrap()).collect()
    }

    #[test]
    fn the_path_is_searched_as_a_shell_does() {
        let mut options = ExecOptions::default();
        options.env.insert("PATH".into(), "/a:/b/::/c".into());
        let found = command(&["prog", "x"], &options).unwrap();
        assert_eq!(strings(&found.candidates), ["/a/prog", "/b//prog", "./prog", "/c/prog"]);
        assert_eq!(strings(&found.argv), ["prog", "x"]);
        let direct = command(&["./prog"], &options).unwrap();
        assert_eq!(strings(&direct.candidates), ["./prog"]);
    }

    #[test]
    fn nothing_but_the_callers_environment_and_the_users_defaults() {
        let mut options = ExecOptions::default();
        options.env.insert("HOME".into(), "/x".into());
        let found = command(&["true"], &options).unwrap();
        assert_eq!(
            strings(&found.envp),
            ["HOME=/x", "LOGNAME=u", &format!("PATH={DEFAULT_PATH}"), "SHELL=/bin/bash", "USER=u"]
        );
        assert_eq!(found.cwd.to_str(), Ok("/workspace/output"));
    }

    #[test]
    fn what_cannot_be_executed_is_refused_with_a_shells_status() {
        let options = ExecOptions::default();
        assert_eq!(command(&[], &options).unwrap_err().exit_code, 127);
        assert_eq!(command(&[""], &options).unwrap_err().exit_code, 127);
        assert_eq!(command(&["a\0b"], &options).unwrap_err().exit_code, 126);
        assert_eq!(command(&["a", "\0"], &options).unwrap_err().exit_code, 126);
        let relative = ExecOptions { cwd: "tmp".into(), ..ExecOptions::default() };
        assert_eq!(command(&["a"], &relative).unwrap_err().exit_code, 126);
        let mut bad = ExecOptions::default();
        bad.env.insert("A=B".into(), "c".into());
        assert_eq!(command(&["a"], &bad).unwrap_err().exit_code, 126);
        let found = command(&["a"], &options).unwrap();
        assert_eq!(found.exec_error(libc::ENOENT).exit_code, 127);
        assert_eq!(found.exec_error(libc::EACCES).exit_code, 126);
    }
}

//! Source text as a command line.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsRawFd as _, OwnedFd};

use rustix::fs::MemfdFlags;

/// Longest source that goes on the command line; the kernel's limit for one argument is 128 KiB.
const MAX_INLINE: usize = 96 * 1024;

/// The command that runs `code`, and a descriptor that it must inherit if the source is long.
///
/// Both ways leave standard input to the program, and `sys.path` of Python begins with the working
/// folder, so that modules there can be imported.
///
/// # Errors
/// Unknown language, or a NUL byte in the source.
pub fn command(language: &str, code: String) -> Result<(Vec<String>, Option<OwnedFd>), String> {
    let program = match language {
        "python" => "python3",
        "bash" => "bash",
        "javascript" => "node",
        other => {
            return Err(format!("the language is {other:?}; it can be python, bash or javascript"));
        }
    };
    if code.contains('\0') {
        return Err("the source has a NUL byte".to_owned());
    }
    let words = |rest: &[&str]| {
        std::iter::once(program).chain(rest.iter().copied()).map(str::to_owned).collect()
    };
    if code.len() <= MAX_INLINE {
        let flag = if program == "node" { "-e" } else { "-c" };
        return Ok((words(&[flag, &code]), None));
    }
    let store = || {
        let mut file = File::from(rustix::fs::memfd_create("code", MemfdFlags::CLOEXEC)?);
        file.write_all(code.as_bytes())?;
        std::io::Seek::rewind(&mut file)?;
        std::io::Result::Ok(OwnedFd::from(file))
    };
    let file = store().map_err(|e| format!("cannot hold the source in memory: {e}"))?;
    let number = file.as_raw_fd();
    let command = if program == "python3" {
        let load = format!(
            "with open({number}, encoding='utf-8') as _f: _f = _f.read()\n\
             exec(compile(_f, '<string>', 'exec'))"
        );
        words(&["-c", &load])
    } else {
        words(&[&format!("/dev/fd/{number}")])
    };
    Ok((command, Some(file)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_source_is_an_argument_and_long_source_a_file() {
        let (words, file) = command("python", "print(1)".into()).unwrap();
        assert_eq!(words, ["python3", "-c", "print(1)"]);
        assert!(file.is_none());
        let long = "#".repeat(MAX_INLINE + 1);
        let (words, file) = command("bash", long).unwrap();
        assert_eq!(words, ["bash", &format!("/dev/fd/{}", file.unwrap().as_raw_fd())]);
    }

    #[test]
    fn unknown_languages_and_nul_bytes_are_refused() {
        assert!(command("perl", "1".into()).unwrap_err().contains("python, bash or"));
        assert!(command("bash", "a\0b".into()).is_err());
    }
}

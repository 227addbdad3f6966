//! Who may call: tokens and the names of their holders.
//!
//! Only digests of tokens are kept, and every request is compared with all of them, each in constant
//! time.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use sha2::{Digest, Sha256};

/// Least characters of a token: 128 bits as hexadecimal digits.
const MIN_TOKEN: usize = 32;
/// Most characters of a token.
const MAX_TOKEN: usize = 512;
/// Most characters of a caller's name.
const MAX_NAME: usize = 64;
/// Most bytes of a token file.
const MAX_FILE: u64 = 1 << 20;
/// The caller whose token is made at the first start.
const DEFAULT_CALLER: &str = "default";

/// What is wrong with a token file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// It cannot be read or made.
    #[error("cannot {what} the token file {}: {error}", .path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// Others could read it.
    #[error(
        "the token file {} can be read by other users, so its tokens are no secret; make new ones and \
         `chmod 600` it",
        .0.display()
    )]
    Open(PathBuf),
    /// Another user could change it.
    #[error("the token file {} belongs to another user", .0.display())]
    Foreign(PathBuf),
    /// A line is wrong.
    #[error("{}, line {line}: {problem}", .path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong with it; never the token itself.
        problem: String,
    },
    /// It names nobody.
    #[error("the token file {} has no line `NAME TOKEN`, so nobody could call", .0.display())]
    Empty(PathBuf),
}

/// A caller and its token.
#[derive(Clone)]
pub struct Entry {
    /// Name of the caller.
    pub name: String,
    /// What it presents.
    pub token: String,
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Reads a token file: lines `NAME TOKEN`, empty ones, and comments that begin with `#`.
///
/// # Errors
/// It cannot be read, others can read or change it, a line is wrong, or there is none.
pub fn read(path: &Path) -> Result<Vec<Entry>, TokenError> {
    let io = |what, error| TokenError::Io { what, path: path.to_owned(), error };
    let file = File::open(path).map_err(|e| io("read", e))?;
    let meta = file.metadata().map_err(|e| io("look at", e))?;
    if meta.mode() & 0o077 != 0 {
        return Err(TokenError::Open(path.to_owned()));
    }
    if meta.uid() != rustix::process::geteuid().as_raw() && meta.uid() != 0 {
        return Err(TokenError::Foreign(path.to_owned()));
    }
    let mut text = String::new();
    file.take(MAX_FILE).read_to_string(&mut text).map_err(|e| io("read", e))?;
    parse(path, &text)
}

fn parse(path: &Path, text: &str) -> Result<Vec<Entry>, TokenError> {
    let mut entries: Vec<Entry> = Vec::new();
    for (n, line) in text.lines().enumerate() {
        let line_error = |problem: String| TokenError::Line {
            path: path.to_owned(),
            line: n.saturating_add(1),
            problem,
        };
        let mut words = line.split_whitespace();
        let Some(name) = words.next().filter(|word| !word.starts_with('#')) else { continue };
        let (Some(token), None) = (words.next(), words.next()) else {
            return Err(line_error("write a caller's name, a space and its token".to_owned()));
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        if name.len() > MAX_NAME || !name.chars().all(plain) {
            return Err(line_error(format!(
                "a caller's name has 1 to {MAX_NAME} letters, digits, `_`, `.` or `-`"
            )));
        }
        // RFC 6750, 2.1: what may stand in a header after `Bearer`.
        let bearer = |c: char| c.is_ascii_alphanumeric() || "-._~+/=".contains(c);
        if !(MIN_TOKEN..=MAX_TOKEN).contains(&token.len()) || !token.chars().all(bearer) {
            return Err(line_error(format!(
                "the token of {name} must have {MIN_TOKEN} to {MAX_TOKEN} letters, digits or any of \
                 -._~+/= (`openssl rand -hex 32` makes one)"
            )));
        }
        if entries.iter().any(|entry| entry.name == name) {
            return Err(line_error(format!("there are two lines for {name}")));
        }
        if entries.iter().any(|entry| entry.token == token) {
            return Err(line_error(format!("the token of {name} is another caller's too")));
        }
        entries.push(Entry { name: name.to_owned(), token: token.to_owned() });
    }
    if entries.is_empty() {
        return Err(TokenError::Empty(path.to_owned()));
    }
    Ok(entries)
}

/// Reads the token file, or makes one with a single caller, `default`, and a random token; only its
/// owner can read it. Tells whether it was made.
///
/// # Errors
/// As [`read`], or it cannot be made.
pub fn read_or_make(path: &Path) -> Result<(Vec<Entry>, bool), TokenError> {
    let io = |what, error| TokenError::Io { what, path: path.to_owned(), error };
    if fs::exists(path).map_err(|e| io("look for", e))? {
        return Ok((read(path)?, false));
    }
    let mut random = [0u8; 32];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| io("make a token for", e.into()))?;
    let token = hex(&random);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(|e| io("make the folder of", e))?;
    }
    // Written under another name, so that a second server that starts meanwhile sees all or nothing.
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}", hex(&random[..8])));
    let draft = PathBuf::from(name);
    let result = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&draft)
        .and_then(|mut file| writeln!(file, "# name token\n{DEFAULT_CALLER} {token}"))
        .and_then(|()| fs::hard_link(&draft, path));
    // Gone, or not made.
    let _ = fs::remove_file(&draft);
    match result {
        Ok(()) => Ok((vec![Entry { name: DEFAULT_CALLER.to_owned(), token }], true)),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok((read(path)?, false)),
        Err(e) => Err(io("make", e)),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}

type Sum = [u8; 32];

fn digest(token: &str) -> Sum {
    Sha256::digest(token.as_bytes()).into()
}

/// Compares without an early end.
fn same(a: &Sum, b: &Sum) -> bool {
    let difference = a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b));
    std::hint::black_box(difference) == 0
}

/// Callers by the digests of their tokens.
#[derive(Debug)]
pub(super) struct Callers<T>(Vec<(Sum, T)>);

impl<T> Callers<T> {
    pub(super) fn new(entries: impl IntoIterator<Item = (String, T)>) -> Self {
        Self(entries.into_iter().map(|(token, caller)| (digest(&token), caller)).collect())
    }

    /// Whose token the request holds. `Ok(None)`: it has no `Authorization` at all.
    pub(super) fn find(&self, headers: &HeaderMap) -> Result<Option<&T>, Refused> {
        let mut values = headers.get_all(AUTHORIZATION).iter();
        let Some(value) = values.next() else { return Ok(None) };
        if values.next().is_some() {
            return Err(Refused);
        }
        let (scheme, token) =
            value.to_str().ok().and_then(|text| text.split_once(' ')).ok_or(Refused)?;
        if !scheme.eq_ignore_ascii_case("bearer") {
            return Err(Refused);
        }
        let wanted = digest(token.trim());
        let mut found = None;
        for (sum, caller) in &self.0 {
            if same(sum, &wanted) {
                found = Some(caller);
            }
        }
        found.map(Some).ok_or(Refused)
    }
}

/// The request's credentials are nobody's.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refused;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    const B: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

    fn parsed(text: &str) -> Result<Vec<(String, String)>, String> {
        parse(Path::new("t"), text)
            .map(|entries| entries.into_iter().map(|e| (e.name, e.token)).collect())
            .map_err(|e| e.to_string())
    }

    #[test]
    fn a_file_names_callers_and_their_tokens() {
        let text = format!("# people\n\nana {A}\n  ci-1   {B}  \n");
        let wanted = [("ana", A), ("ci-1", B)].map(|(n, t)| (n.to_owned(), t.to_owned()));
        assert_eq!(parsed(&text).unwrap(), wanted);
    }

    #[test]
    fn wrong_lines_are_refused_and_tokens_are_not_repeated() {
        for (text, problem) in [
            (format!("ana {A} admin"), "line 1: write a caller's name"),
            ("ana".to_owned(), "line 1: write a caller's name"),
            (format!("an/a {A}"), "line 1: a caller's name has"),
            (format!("\n{} {A}", "n".repeat(65)), "line 2: a caller's name has"),
            ("ana secret".to_owned(), "the token of ana must have 32 to 512"),
            (format!("ana {}\"", A), "the token of ana must have 32 to 512"),
            (format!("ana {A}\nana {B}"), "line 2: there are two lines for ana"),
            (format!("ana {A}\nbob {A}"), "line 2: the token of bob is another caller's too"),
            ("# nobody".to_owned(), "nobody could call"),
        ] {
            let error = parsed(&text).unwrap_err();
            assert!(error.contains(problem), "{error}");
            assert!(!error.contains("secret") && !error.contains(A), "{error}");
        }
    }

    #[test]
    fn the_first_start_makes_a_token_that_the_second_finds() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/token");
        let (first, made) = read_or_make(&path).unwrap();
        assert!(made);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        let (second, made) = read_or_make(&path).unwrap();
        assert!(!made);
        assert_eq!((&first[0].name, &first[0].token), (&second[0].name, &second[0].token));
        assert_eq!(first[0].token.len(), 64);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        let (other, _) = read_or_make(&folder.path().join("other")).unwrap();
        assert_ne!(first[0].token, other[0].token);
    }

    #[test]
    fn a_file_that_others_can_read_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, format!("ana {A}\n")).unwrap();
        for mode in [0o640, 0o604, 0o660, 0o601] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert!(matches!(read(&path), Err(TokenError::Open(_))), "{mode:o}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
        assert_eq!(read(&path).unwrap()[0].name, "ana");
    }

    #[test]
    fn only_a_whole_token_opens() {
        let callers = Callers::new([(A.to_owned(), "ana"), (B.to_owned(), "bob")]);
        let find = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(AUTHORIZATION, value.parse().unwrap());
            }
            callers.find(&headers).map(|found| found.copied())
        };
        assert_eq!(find(&[]), Ok(None));
        assert_eq!(find(&[&format!("Bearer {A}")]), Ok(Some("ana")));
        assert_eq!(find(&[&format!("bearer {B}")]), Ok(Some("bob")));
        for wrong in [
            "Bearer",
            "Bearer ",
            A,
            &format!("Basic {A}"),
            &format!("Bearer {}", &A[1..]),
            &format!("Bearer {A}a"),
            &format!("Bearer {A},{B}"),
        ] {
            assert_eq!(find(&[wrong]), Err(Refused), "{wrong}");
        }
        let both = [format!("Bearer {A}"), format!("Bearer {B}")];
        assert_eq!(find(&[&both[0], &both[1]]), Err(Refused));
    }
}

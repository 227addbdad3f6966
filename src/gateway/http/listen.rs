//! Where the server listens: a TCP address, or a socket in the file system for this user alone.

use std::fmt;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

/// Where to listen, or where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// An address and a port; port 0: any that is free.
    Tcp(SocketAddr),
    /// A socket in the file system.
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() {
                Err("give a path after `unix:`".to_owned())
            } else {
                Ok(Self::Unix(path.into()))
            };
        }
        let wanted = "use an address and a port such as 127.0.0.1:7420 or [::1]:7420, or unix:PATH";
        match text.strip_prefix("localhost:") {
            Some(port) => port
                .parse()
                .map(|port| Self::Tcp(SocketAddr::from(([127, 0, 0, 1], port))))
                .map_err(|_| wanted.to_owned()),
            None => text.parse().map(Self::Tcp).map_err(|_| wanted.to_owned()),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A listening socket.
#[derive(Debug)]
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, SocketFile),
}

/// A connection that was accepted.
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Listener {
    pub(super) async fn bind(address: &Address) -> io::Result<Self> {
        match address {
            Address::Tcp(address) => Ok(Self::Tcp(TcpListener::bind(address).await?)),
            Address::Unix(path) => {
                let (listener, file) = bind_unix(path)?;
                Ok(Self::Unix(listener, file))
            }
        }
    }

    pub(super) fn address(&self) -> io::Result<Address> {
        match self {
            Self::Tcp(listener) => Ok(Address::Tcp(listener.local_addr()?)),
            Self::Unix(_, file) => Ok(Address::Unix(file.path.clone())),
        }
    }

    /// The next connection. Peers on a socket in the file system that run as neither this user nor
    /// root are dropped.
    pub(super) async fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                // Small answers must not wait for more.
                stream.set_nodelay(true)?;
                noticing_the_dead(&stream)?;
                Ok(Stream::Tcp(stream))
            }
            Self::Unix(listener, _) => loop {
                let (stream, _) = listener.accept().await?;
                let own = rustix::process::geteuid().as_raw();
                if stream.peer_cred().is_ok_and(|peer| welcome(peer.uid(), own)) {
                    return Ok(Stream::Unix(stream));
                }
            },
        }
    }
}

/// Has the kernel end a connection whose peer has been silent for two minutes though it was asked six
/// times: some connections, such as those of commands that wait, are quiet for hours.
fn noticing_the_dead(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(60))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(10))?;
    sockopt::set_tcp_keepcnt(stream, 6)?;
    Ok(sockopt::set_socket_keepalive(stream, true)?)
}

fn welcome(peer: u32, own: u32) -> bool {
    peer == own || peer == 0
}

/// Binds a socket that only this user can connect to. One that a server left behind when it was
/// killed is replaced; a server that still lives, or anything else in that place, is not touched.
fn bind_unix(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    let path = std::path::absolute(path)?;
    // Two servers that start at once must not each take the other's new socket for one left behind.
    let folder = path.parent().unwrap_or(Path::new("/"));
    let folder = rustix::fs::open(
        folder,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    rustix::fs::flock(&folder, FlockOperation::LockExclusive)?;
    match fs::symlink_metadata(&path) {
        Ok(meta) => {
            if !meta.file_type().is_socket() {
                let text = "there is something else with that name; remove it or choose another";
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
            }
            if meta.uid() != rustix::process::geteuid().as_raw() {
                let text = "the socket there belongs to another user";
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
            }
            if std::os::unix::net::UnixStream::connect(&path).is_ok() {
                let text = "another server listens there";
                return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
            }
            fs::remove_file(&path)?;
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    // Nobody can connect before `listen`, and that comes after the mode.
    let socket = rustix::net::socket_with(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK,
        None,
    )?;
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new(&path)?)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    let meta = fs::symlink_metadata(&path)?;
    rustix::net::listen(&socket, 128)?;
    let file = SocketFile { path, identity: (meta.dev(), meta.ino()) };
    Ok((UnixListener::from_std(socket.into())?, file))
}

/// The socket's name, removed at the end if it is still the same socket.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let same = fs::symlink_metadata(&self.path)
            .is_ok_and(|meta| (meta.dev(), meta.ino()) == self.identity);
        if same {
            // Nothing more can be done about a folder that is read-only by now.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let tcp = |text: &str| Address::Tcp(text.parse().unwrap());
        assert_eq!("127.0.0.1:7420".parse(), Ok(tcp("127.0.0.1:7420")));
        assert_eq!("localhost:7420".parse(), Ok(tcp("127.0.0.1:7420")));
        assert_eq!("[::1]:0".parse(), Ok(tcp("[::1]:0")));
        assert_eq!("unix:/run/x".parse(), Ok(Address::Unix("/run/x".into())));
        for bad in ["", "7420", ":7420", "example.com:7420", "unix:", "localhost:x"] {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
    }

    #[test]
    fn only_this_user_and_root_are_welcome() {
        assert!(welcome(1000, 1000));
        assert!(welcome(0, 1000));
        assert!(!welcome(1001, 1000));
        assert!(!welcome(1000, 0));
    }

    #[tokio::test]
    async fn a_socket_is_for_its_user_and_goes_with_the_server() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = Listener::bind(&Address::Unix(path.clone())).await.unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        let second = Listener::bind(&Address::Unix(path.clone())).await.unwrap_err();
        assert_eq!(second.kind(), io::ErrorKind::AddrInUse);
        let (_client, accepted) = tokio::join!(UnixStream::connect(&path), listener.accept());
        accepted.unwrap();
        drop(listener);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_socket_left_behind_is_replaced_and_nothing_else_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        // Its server has ended without removing it.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        drop(Listener::bind(&Address::Unix(path.clone())).await.unwrap());
        // Another program's server that lives.
        let other = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let error = Listener::bind(&Address::Unix(path.clone())).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(other);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "mine").unwrap();
        let error = Listener::bind(&Address::Unix(path.clone())).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/nowhere", &path).unwrap();
        assert!(Listener::bind(&Address::Unix(path.clone())).await.is_err());
        assert!(fs::symlink_metadata(&path).unwrap().is_symlink());
    }

    #[tokio::test]
    async fn a_socket_that_took_the_name_meanwhile_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = Listener::bind(&Address::Unix(path.clone())).await.unwrap();
        fs::remove_file(&path).unwrap();
        let _other = std::os::unix::net::UnixListener::bind(&path).unwrap();
        drop(listener);
        assert!(path.exists());
    }
}

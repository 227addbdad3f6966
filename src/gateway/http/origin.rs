//! Whether a request may come from a browser, and through which name.
//!
//! A web page can make its visitor's browser send requests to a server on loopback, either under the
//! page's own origin or, with DNS rebinding, under a name of the attacker's that suddenly means
//! 127.0.0.1. The first has a foreign `Origin`, the second a foreign `Host`.

use hyper::header::{HOST, HeaderName, ORIGIN};
use hyper::http::uri::Authority;
use hyper::{HeaderMap, Uri};

const LOOPBACK: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];

/// The names under which a server is reached, and the origins whose pages may call it.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    /// Lower case; `None`: any (a socket in the file system, which no browser reaches).
    hosts: Option<Vec<String>>,
    /// Lower case, `scheme://host[:port]`.
    origins: Vec<String>,
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Foreign {
    Host,
    Origin,
}

impl Names {
    /// Loopback and `hosts`; pages of loopback and of `origins`.
    pub(super) fn new(hosts: &[String], origins: &[String]) -> Self {
        let hosts = LOOPBACK.into_iter().chain(hosts.iter().map(String::as_str));
        Self {
            hosts: Some(hosts.map(str::to_ascii_lowercase).collect()),
            origins: origins.iter().map(|o| o.to_ascii_lowercase()).collect(),
        }
    }

    /// Any host name; pages of loopback and of `origins`.
    pub(super) fn any_host(origins: &[String]) -> Self {
        Self { hosts: None, ..Self::new(&[], origins) }
    }

    pub(super) fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), Foreign> {
        if let Some(hosts) = &self.hosts {
            let header = single(headers, HOST).map_err(|()| Foreign::Host)?;
            let named = [header, uri.authority().map(Authority::as_str)];
            let mut named = named.into_iter().flatten().peekable();
            // Every name that the request states, and it must state one.
            if named.peek().is_none() || !named.all(|name| host_of(name, hosts)) {
                return Err(Foreign::Host);
            }
        }
        match single(headers, ORIGIN).map_err(|()| Foreign::Origin)? {
            None => Ok(()),
            Some(origin) if self.allows(origin) => Ok(()),
            Some(_) => Err(Foreign::Origin),
        }
    }

    fn allows(&self, origin: &str) -> bool {
        let origin = origin.to_ascii_lowercase();
        if self.origins.contains(&origin) {
            return true;
        }
        // Pages of this machine, from any port.
        let rest = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        rest.is_some_and(|rest| host_of(rest, &LOOPBACK))
    }
}

fn host_of(authority: &str, hosts: &[impl AsRef<str>]) -> bool {
    let Ok(parsed) = authority.parse::<Authority>() else { return false };
    // What comes before an `@` is no host; browsers never send it.
    let plain = !authority.contains('@');
    // A port that is no number has been let through by the parser.
    let port = parsed.port_u16().is_some() || parsed.as_str().len() == parsed.host().len();
    plain && port && hosts.iter().any(|host| host.as_ref().eq_ignore_ascii_case(parsed.host()))
}

/// The one value of a header, as text.
fn single(headers: &HeaderMap, name: HeaderName) -> Result<Option<&str>, ()> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => value.to_str().map(Some).map_err(|_| ()),
        (Some(_), Some(_)) => Err(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(names: &Names, host: &[&str], origin: &[&str]) -> Result<(), Foreign> {
        let mut headers = HeaderMap::new();
        for value in host {
            headers.append(HOST, value.parse().unwrap());
        }
        for value in origin {
            headers.append(ORIGIN, value.parse().unwrap());
        }
        names.check(&Uri::from_static("/mcp"), &headers)
    }

    #[test]
    fn only_names_of_this_server_are_hosts() {
        let names = Names::new(&["Mcp.Example.com".to_owned()], &[]);
        for good in
            ["localhost", "LOCALHOST:7420", "127.0.0.1:1", "[::1]:7420", "mcp.example.com:443"]
        {
            assert_eq!(check(&names, &[good], &[]), Ok(()), "{good}");
        }
        for bad in [
            "evil.com",
            "localhost.evil.com",
            "127.0.0.1.evil.com:7420",
            "127.0.0.2",
            "2130706433",
            "0x7f000001",
            "localhost@evil.com",
            "evil.com@localhost",
            "localhost:x",
            "localhost:99999",
            "[::ffff:127.0.0.1]",
            "",
            "local host",
        ] {
            assert_eq!(check(&names, &[bad], &[]), Err(Foreign::Host), "{bad}");
        }
        assert_eq!(check(&names, &[], &[]), Err(Foreign::Host));
        assert_eq!(check(&names, &["localhost", "localhost"], &[]), Err(Foreign::Host));
    }

    #[test]
    fn a_request_line_with_another_host_is_foreign_too() {
        let names = Names::new(&[], &[]);
        let mut headers = HeaderMap::new();
        headers.append(HOST, "localhost".parse().unwrap());
        let uri = Uri::from_static("http://evil.com/mcp");
        assert_eq!(names.check(&uri, &headers), Err(Foreign::Host));
    }

    #[test]
    fn only_pages_of_this_machine_and_named_ones_call() {
        let names = Names::new(&[], &["https://app.example.com".to_owned()]);
        for good in [
            "http://localhost",
            "http://localhost:6274",
            "https://127.0.0.1:8443",
            "http://[::1]:3000",
            "https://app.example.com",
        ] {
            assert_eq!(check(&names, &["localhost"], &[good]), Ok(()), "{good}");
        }
        for bad in [
            "null",
            "file://",
            "http://evil.com",
            "http://localhost.evil.com",
            "http://localhost@evil.com",
            "http://app.example.com",
            "https://app.example.com:8443",
            "https://app.example.com.evil.com",
            "chrome-extension://localhost",
            "",
        ] {
            assert_eq!(check(&names, &["localhost"], &[bad]), Err(Foreign::Origin), "{bad}");
        }
        let two = ["http://localhost", "http://evil.com"];
        assert_eq!(check(&names, &["localhost"], &two), Err(Foreign::Origin));
    }

    #[test]
    fn a_socket_in_the_file_system_has_no_host_but_still_origins() {
        let names = Names::any_host(&[]);
        assert_eq!(check(&names, &["anything"], &[]), Ok(()));
        assert_eq!(check(&names, &[], &["http://evil.com"]), Err(Foreign::Origin));
    }
}

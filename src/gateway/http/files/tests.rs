//! Files of sandboxes that have ended, over real sockets; and as resources of MCP, over HTTP. The store
//! is filled as if guests had done it.

use std::io::Read as _;
use std::os::unix::ffi::OsStrExt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http_body_util::Full;
use hyper::header::RETRY_AFTER;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::super::super::artifacts::tests::{digest, put};
use super::super::super::{Gateway, Limits};
use super::super::Config;
use super::super::tests::*;
use super::*;

type Files<'a> = &'a [(&'a [u8], &'a [u8])];

fn fill(gateway: &Gateway, owner: &str, id: &str, files: Files<'_>) {
    put(gateway.sandboxes.store.as_ref().unwrap(), owner, id, files);
}

async fn with(limits: Limits) -> Running {
    let config = Config::new("127.0.0.1:0".parse().unwrap(), tokens());
    Running::serving(gateway_with(limits), config).await
}

async fn serving(files: Files<'_>) -> Running {
    let server = with(Limits::default()).await;
    fill(&server.gateway, "ana", "sb_1", files);
    server
}

fn ana(path: &str) -> Request<Full<Bytes>> {
    get(&format!("/v1/sandboxes/{path}"), Some(ANA))
}

fn header_of(
    mut request: Request<Full<Bytes>>,
    name: HeaderName,
    value: &str,
) -> Request<Full<Bytes>> {
    request.headers_mut().insert(name, value.parse().unwrap());
    request
}

fn head(mut request: Request<Full<Bytes>>) -> Request<Full<Bytes>> {
    *request.method_mut() = Method::HEAD;
    request
}

#[tokio::test]
async fn a_file_is_an_attachment_that_no_browser_shows_or_keeps() {
    let server = serving(&[(b"plots/a b\xc3\xa9.html", b"<script>")]).await;
    let path = "sb_1/files/plots/a%20b%C3%A9.html";
    let reply = server.send(ana(path)).await;
    assert_eq!((reply.status, &reply.bytes[..]), (StatusCode::OK, &b"<script>"[..]));
    let tag = format!("\"{}\"", digest(b"<script>"));
    for (name, value) in [
        ("content-type", "text/html"),
        ("content-length", "8"),
        (
            "content-disposition",
            "attachment; filename=\"a_b_.html\"; filename*=UTF-8''a%20b%C3%A9.html",
        ),
        ("x-content-type-options", "nosniff"),
        ("cache-control", "private, no-store"),
        ("content-security-policy", "default-src 'none'; sandbox"),
        ("cross-origin-resource-policy", "same-origin"),
        ("accept-ranges", "bytes"),
        ("etag", tag.as_str()),
    ] {
        assert_eq!(reply.headers[name], value, "{name}");
    }
    let without = server.send(head(ana(path))).await;
    assert!(without.bytes.is_empty());
    for name in reply.headers.keys().filter(|name| *name != "date") {
        assert_eq!(reply.headers[name], without.headers[name], "{name} of HEAD");
    }
}

#[tokio::test]
async fn ranges_and_conditions() {
    let data: Vec<u8> = (0..200_000u32).map(|n| (n % 251) as u8).collect();
    let server = serving(&[(b"data", &data), (b"empty", b"")]).await;
    let range = |range: &str| header_of(ana("sb_1/files/data"), hyper::header::RANGE, range);
    for (wanted, start, end) in [
        ("bytes=0-0", 0, 1),
        ("bytes=100000-", 100_000, 200_000),
        ("bytes=-5", 199_995, 200_000),
        ("bytes=65535-65536", 65_535, 65_537),
        ("bytes=5-99999999999999999999", 5, 200_000),
    ] {
        let reply = server.send(range(wanted)).await;
        assert_eq!(reply.status, StatusCode::PARTIAL_CONTENT, "{wanted}");
        assert!(reply.bytes == data[start..end], "{wanted}");
        let content = format!("bytes {start}-{}/200000", end - 1);
        assert_eq!(reply.headers["content-range"], content.as_str());
    }
    for (wanted, size) in [("bytes=200000-", "data"), ("bytes=-0", "data")] {
        let reply = server.send(range(wanted)).await;
        assert_eq!(reply.status, StatusCode::RANGE_NOT_SATISFIABLE, "{wanted} of {size}");
        assert_eq!(reply.headers["content-range"], "bytes */200000");
        assert!(reply.bytes.is_empty());
    }
    let empty = header_of(ana("sb_1/files/empty"), hyper::header::RANGE, "bytes=0-");
    assert_eq!(server.send(empty).await.status, StatusCode::RANGE_NOT_SATISFIABLE);
    let empty = server.send(ana("sb_1/files/empty")).await;
    assert_eq!((empty.status, empty.bytes.len()), (StatusCode::OK, 0));
    let many = format!("bytes={}", vec!["0-100000"; 2000].join(","));
    for whole in ["bytes=1-2,4-5", "bytes=x", many.as_str()] {
        let reply = server.send(range(whole)).await;
        assert_eq!((reply.status, reply.bytes.len()), (StatusCode::OK, 200_000));
    }
    let tag = format!("\"{}\"", digest(&data));
    let resumed = header_of(range("bytes=1-1"), hyper::header::IF_RANGE, &tag);
    assert_eq!(server.send(resumed).await.status, StatusCode::PARTIAL_CONTENT);
    let other = header_of(range("bytes=1-1"), hyper::header::IF_RANGE, "\"x\"");
    assert_eq!(server.send(other).await.status, StatusCode::OK);
    let same = header_of(ana("sb_1/files/data"), hyper::header::IF_NONE_MATCH, &tag);
    let reply = server.send(same).await;
    assert_eq!((reply.status, reply.bytes.len()), (StatusCode::NOT_MODIFIED, 0));
    let other = header_of(ana("sb_1/files/data"), hyper::header::IF_MATCH, "\"x\"");
    assert_eq!(server.send(other).await.status, StatusCode::PRECONDITION_FAILED);
    let of_head = head(range("bytes=0-0"));
    assert_eq!(server.send(of_head).await.headers["content-length"], "200000");
}

#[tokio::test]
async fn the_list_names_every_file() {
    let server = serving(&[(b"b.csv", b"1,2"), (b"a/\xff \xe2\x80\xae", b"")]).await;
    let reply = server.send(ana("sb_1/files")).await;
    assert_eq!(reply.headers["content-type"], "application/json");
    assert_eq!(reply.headers["cache-control"], "private, no-store");
    let list = reply.json();
    assert_eq!(list["sandbox_id"], "sb_1");
    assert!(list["expires_in_seconds"].as_u64().unwrap() <= 3600);
    let second = json!({
        "path": "b.csv", "size": 3, "sha256": digest(b"1,2"), "media_type": "text/csv",
        "uri": "casulo://sandboxes/sb_1/files/b.csv", "href": "/v1/sandboxes/sb_1/files/b.csv",
    });
    assert_eq!(list["files"][1], second);
    assert_eq!(list["files"][0]["path"], "a/\u{fffd} \\u{202e}");
    let href = list["files"][0]["href"].as_str().unwrap();
    assert_eq!(href, "/v1/sandboxes/sb_1/files/a/%FF%20%E2%80%AE");
    assert_eq!(server.send(get(href, Some(ANA))).await.status, StatusCode::OK);
    assert_eq!(list["files"].as_array().unwrap().len(), 2);
    let head = server.send(head(ana("sb_1/files"))).await;
    assert_eq!(head.headers["content-length"], reply.headers["content-length"]);
}

#[tokio::test]
async fn a_tar_archive_holds_every_file_whatever_its_name() {
    let long = [b"x/".repeat(150), b"end".to_vec()].concat();
    let big: Vec<u8> = (0..1_000_001u32).map(|n| (n / 7) as u8).collect();
    let files: [(&[u8], &[u8]); 6] = [
        (b"a.txt", b"hello"),
        (b"big", &big),
        (b"block", &[7; 512]),
        (b"empty", b""),
        (b"no utf-8 \xff", b"bytes"),
        (&long, b"long"),
    ];
    let server = serving(&files).await;
    let by_query = server.send(ana("sb_1/files?format=tar")).await;
    assert_eq!(by_query.headers["content-type"], "application/x-tar");
    assert!(by_query.headers["content-disposition"].to_str().unwrap().contains("\"sb_1.tar\""));
    assert_eq!(by_query.bytes.len() % 512, 0);
    let accept = "text/html, application/x-tar;q=0.9";
    let by_header = header_of(ana("sb_1/files"), ACCEPT, accept);
    assert_eq!(server.send(by_header).await.bytes, by_query.bytes);
    let mut archive = tar::Archive::new(&by_query.bytes[..]);
    let mut found = Vec::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let mut data = Vec::new();
        entry.read_to_end(&mut data).unwrap();
        assert_eq!(entry.header().mode().unwrap(), 0o644);
        found.push((entry.path_bytes().into_owned(), data));
    }
    let expected: Vec<(Vec<u8>, Vec<u8>)> =
        files.iter().map(|(path, data)| (path.to_vec(), data.to_vec())).collect();
    assert!(found == expected, "{:?}", found.iter().map(|(path, _)| path).collect::<Vec<_>>());
    // An independent reader, where there is one.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.tar");
    std::fs::write(&file, &by_query.bytes).unwrap();
    let out = folder.path().join("out");
    std::fs::create_dir(&out).unwrap();
    let untar =
        std::process::Command::new("tar").arg("-xf").arg(&file).arg("-C").arg(&out).status();
    assert!(untar.unwrap().success());
    for (path, data) in files {
        let read = std::fs::read(out.join(std::ffi::OsStr::from_bytes(path))).unwrap();
        assert!(read == data, "{path:?}");
    }
}

#[tokio::test]
async fn only_json_and_tar_are_known() {
    let server = serving(&[(b"a", b"")]).await;
    for (query, status) in [
        ("format=zip", StatusCode::BAD_REQUEST),
        ("format=", StatusCode::BAD_REQUEST),
        ("format=json", StatusCode::OK),
        ("x=1", StatusCode::OK),
    ] {
        let reply = server.send(ana(&format!("sb_1/files?{query}"))).await;
        assert_eq!(reply.status, status, "{query}");
    }
    for method in [Method::POST, Method::PUT, Method::DELETE, Method::PATCH, Method::OPTIONS] {
        for path in ["sb_1/files", "sb_1/files/a"] {
            let mut request = ana(path);
            *request.method_mut() = method.clone();
            let reply = server.send(request).await;
            assert_eq!(reply.status, StatusCode::METHOD_NOT_ALLOWED, "{method}");
            assert_eq!(reply.headers["allow"], "GET, HEAD");
        }
    }
}

#[tokio::test]
async fn foreign_expired_unknown_and_strange_get_one_and_the_same_answer() {
    let server = serving(&[(b"a", b"1"), (b"dir/b", b"2")]).await;
    let mut answers = Vec::new();
    for path in ["sb_1/files", "sb_1/files/a", "sb_1/files?format=tar"] {
        answers.push((server.send(get(&format!("/v1/sandboxes/{path}"), Some(BOB))).await, path));
    }
    for path in [
        "sb_2/files",
        "sb_2/files/a",
        "sb_1/files/",
        "sb_1/files/x",
        "sb_1/files/A",
        "sb_1/files/dir",
        "sb_1/files/dir/",
        "sb_1/file",
        "sb_1",
        "sb_1/",
        "",
        "/files",
        "//files",
        "sb_1//files",
        "sb_1/files//a",
        "sb_1/files/a/",
        "sb_1/files/./a",
        "sb_1/files/dir/../a",
        "sb_1/files/..",
        "sb_1/files/../files",
        "sb_1/files/%2e%2e/sb_1/0",
        "sb_1/files/%2e%2e%2fsb_1%2f0",
        "sb_1/files/..%2f..%2f..%2fetc%2fpasswd",
        "sb_1/files//etc/passwd",
        "sb_1/files/%2fetc%2fpasswd",
        "sb_1/files/../../../../etc/passwd",
        "sb_1/files/a%00",
        "sb_1/files/%00",
        "sb_1/files/a%00.txt",
        "sb_1/files/dir%5cb",
        "sb_1/files/..%5c..%5cetc",
        "sb_1/files/%252e%252e/a",
        "sb_1/files/0",
        "sb_1/files/%",
        "sb_1/files/a%",
        "sb_1/files/%zz",
        "sb_1/files/a%2",
        "sb_1.live/files",
        "../sb_1/files",
        "%2e%2e/files",
        "sb_1%2f/files",
        "sb_1%00/files",
        "sb%5f1/files",
        "*/files",
        "sb_1/files/a;x",
        "sb_1/files/*",
    ] {
        answers.push((server.send(ana(path)).await, path));
    }
    let long = format!("sb_1/files/{}", "a/".repeat(20_000));
    answers.push((server.send(ana(&long)).await, "long"));
    for (reply, path) in &answers {
        assert_eq!(reply.status, StatusCode::NOT_FOUND, "{path}");
        assert_eq!(reply.body, answers[0].0.body, "{path}");
    }
    assert_eq!(answers[0].0.json()["class"], "sandbox_not_found");
    let two: Vec<_> = [ana("sb_1/files/a"), ana("sb_1/files/%64ir/b")].into();
    for request in two {
        assert_eq!(server.send(request).await.status, StatusCode::OK);
    }
    let gateway = &server.gateway;
    gateway.sandboxes.store.as_ref().unwrap().clear();
    assert_eq!(server.send(ana("sb_1/files")).await.body, answers[0].0.body);
}

#[tokio::test]
async fn hosts_and_origins_are_checked_as_for_every_other_path() {
    let server = serving(&[(b"a", b"1")]).await;
    for (name, value, status) in [
        (hyper::header::HOST, "evil.com", StatusCode::FORBIDDEN),
        (hyper::header::ORIGIN, "http://evil.com", StatusCode::FORBIDDEN),
        (hyper::header::ORIGIN, "http://localhost:3000", StatusCode::OK),
    ] {
        let reply = server.send(header_of(ana("sb_1/files/a"), name, value)).await;
        assert_eq!(reply.status, status, "{value}");
        assert!(!reply.headers.contains_key("access-control-allow-origin"));
    }
    let stranger = get("/v1/sandboxes/sb_1/files/a", Some("wrong"));
    assert_eq!(server.send(stranger).await.status, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn after_their_time_files_are_gone() {
    let limits = Limits { artifact_ttl: Duration::from_secs(1), ..Limits::default() };
    let server = with(limits).await;
    fill(&server.gateway, "ana", "sb_1", &[(b"a", b"1")]);
    let get = async || server.send(ana("sb_1/files/a")).await;
    let first = get().await;
    while get().await.status == StatusCode::OK {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(first.status == StatusCode::OK || first.status == StatusCode::NOT_FOUND);
    assert_eq!(get().await.body, server.send(ana("sb_2/files/a")).await.body);
}

/// Sends a request and gives the connection with the answer unread.
async fn begin(server: &Running, token: &str, path: &str) -> tokio::net::TcpStream {
    let mut stream = server.connect().await;
    let head = format!(
        "GET /v1/sandboxes/{path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

async fn in_flight(server: &Running) -> u64 {
    let text = server.send(get("/metrics", Some(ANA))).await.body;
    let line = text.lines().find_map(|line| line.strip_prefix("casulo_http_in_flight "));
    line.unwrap().parse().unwrap()
}

async fn until(server: &Running, count: u64) {
    let work = async {
        while in_flight(server).await != count {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, work).await.unwrap();
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut_off() {
    let big = vec![1; 40 << 20];
    let limits = Limits { stall: Duration::from_secs(1), ..Limits::default() };
    let server = with(limits).await;
    fill(&server.gateway, "ana", "sb_1", &[(b"big", &big)]);
    for path in ["sb_1/files/big", "sb_1/files?format=tar"] {
        let mut stream = begin(&server, ANA, path).await;
        until(&server, 1).await;
        until(&server, 0).await;
        let mut rest = Vec::new();
        let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut rest)).await.unwrap();
        assert!(rest.starts_with(b"HTTP/1.1 200") && rest.len() < big.len(), "{}", rest.len());
    }
    // One that reads gets it all.
    assert_eq!(server.send(ana("sb_1/files/big")).await.bytes.len(), big.len());
}

#[tokio::test(start_paused = true)]
async fn a_client_that_takes_less_than_the_least_over_time_is_cut_off() {
    let size = 20 * CHUNK;
    let gateway = gateway_with(Limits::default());
    fill(&gateway, "ana", "sb_1", &[(b"big", &vec![1; size])]);
    let store = gateway.sandboxes.store.as_ref().unwrap();
    let (kept, _) = store.get(&"ana".into(), "sb_1").unwrap();
    // A chunk in 16 seconds is the least, with a minute's grace.
    for (seconds, whole) in [(1, true), (16, true), (24, false), (59, false)] {
        let length = u64::try_from(size).unwrap();
        let piece = Box::new(std::iter::once(Piece::File { place: 0, start: 0, length }));
        let stall = gateway.sandboxes.limits.stall;
        let mut taken = stream(Arc::clone(&kept), piece, stall, Arc::clone(&gateway.metrics));
        let mut got = 0;
        while let Some(bytes) = taken.next().await {
            got += bytes.len();
            tokio::time::sleep(Duration::from_secs(seconds)).await;
        }
        assert_eq!(got == size, whole, "{got} bytes with {seconds} seconds for each {CHUNK}");
        assert!(got >= CHUNK);
    }
}

#[tokio::test]
async fn a_caller_has_so_many_downloads_and_another_ones_are_not_in_its_way() {
    let big = vec![1; 40 << 20];
    let limits = Limits { calls: 3, calls_per_caller: 2, ..Limits::default() };
    let server = with(limits).await;
    for (owner, id) in [("ana", "sb_1"), ("bob", "sb_2")] {
        fill(&server.gateway, owner, id, &[(b"big", &big), (b"small", b"x")]);
    }
    let held =
        [begin(&server, ANA, "sb_1/files/big").await, begin(&server, ANA, "sb_1/files/big").await];
    until(&server, 2).await;
    let reply = server.send(ana("sb_1/files/small")).await;
    assert_eq!(reply.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(reply.json()["class"], "capacity");
    assert!(reply.headers.contains_key(RETRY_AFTER));
    let bob = get("/v1/sandboxes/sb_2/files/small", Some(BOB));
    assert_eq!(server.send(bob).await.status, StatusCode::OK);
    // Who goes away makes place.
    drop(held);
    until(&server, 0).await;
    assert_eq!(server.send(ana("sb_1/files/small")).await.status, StatusCode::OK);
}

#[tokio::test]
async fn requests_for_files_count_as_calls() {
    let limits = Limits { calls_per_minute: 1, burst: 1, ..Limits::default() };
    let server = with(limits).await;
    fill(&server.gateway, "ana", "sb_1", &[(b"a", b"x")]);
    assert_eq!(server.send(ana("sb_1/files/a")).await.status, StatusCode::OK);
    for path in ["sb_1/files/a", "sb_1/files", "sb_2/files"] {
        assert_eq!(server.send(ana(path)).await.status, StatusCode::TOO_MANY_REQUESTS, "{path}");
    }
    let list = server.send(modern(Some(ANA), "resources/list", json!({}))).await.json();
    assert_eq!(list["error"]["code"], -31000, "{list}");
}

#[tokio::test]
async fn while_draining_a_download_ends_and_new_ones_are_refused() {
    let big = vec![1; 40 << 20];
    let server = with(Limits::default()).await;
    fill(&server.gateway, "ana", "sb_1", &[(b"big", &big)]);
    let mut stream = begin(&server, ANA, "sb_1/files/big").await;
    until(&server, 1).await;
    server.stop.cancel();
    let work = async {
        while server.send(get("/healthz", None)).await.status == StatusCode::OK {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, work).await.unwrap();
    assert_eq!(server.send(ana("sb_1/files/big")).await.status, StatusCode::SERVICE_UNAVAILABLE);
    let mut rest = Vec::new();
    tokio::time::timeout(PATIENCE, stream.read_to_end(&mut rest)).await.unwrap().unwrap();
    assert!(rest.len() > big.len());
}

#[tokio::test]
async fn what_is_given_out_and_kept_is_counted() {
    let server = serving(&[(b"a", b"12345"), (b"b", b"1234567")]).await;
    server.send(header_of(ana("sb_1/files/a"), hyper::header::RANGE, "bytes=1-3")).await;
    server.send(head(ana("sb_1/files/a"))).await;
    let read = json!({"uri": "casulo://sandboxes/sb_1/files/b"});
    server.send(modern(Some(ANA), "resources/read", read)).await;
    let text = server.send(get("/metrics", Some(BOB))).await.body;
    for line in [
        "casulo_artifacts 2",
        "casulo_artifact_bytes 12",
        "casulo_artifact_bytes_served_total 10",
        "casulo_http_requests_total{code=\"206\"} 1",
    ] {
        assert!(text.lines().any(|l| l == line), "no {line} in {text}");
    }
    assert!(!text.contains("sb_1"));
}

async fn ask(server: &Running, token: &str, method: &str, params: Value) -> Value {
    server.send(modern(Some(token), method, params)).await.json()
}

#[tokio::test]
async fn resources_are_the_callers_own_page_by_page() {
    let server = with(Limits::default()).await;
    let paths: Vec<Vec<u8>> = (0..130).map(|n| format!("f{n:03}").into_bytes()).collect();
    let files: Vec<(&[u8], &[u8])> =
        paths.iter().map(|path| (path.as_slice(), &b"x"[..])).collect();
    fill(&server.gateway, "ana", "sb_1", &files);
    fill(&server.gateway, "ana", "sb_2", &files[..20]);
    fill(&server.gateway, "bob", "sb_3", &files[..1]);
    let (mut uris, mut cursor, mut pages) = (Vec::new(), json!({}), 0);
    loop {
        let page = ask(&server, ANA, "resources/list", cursor).await["result"].clone();
        assert_eq!((&page["cacheScope"], &page["ttlMs"]), (&json!("private"), &json!(0)), "{page}");
        for one in page["resources"].as_array().unwrap() {
            assert_eq!(
                (&one["size"], &one["mimeType"]),
                (&json!(1), &json!("application/octet-stream"))
            );
            uris.push(one["uri"].as_str().unwrap().to_owned());
        }
        pages += 1;
        match page.get("nextCursor") {
            Some(next) => cursor = json!({"cursor": next}),
            None => break,
        }
    }
    assert_eq!((pages, uris.len()), (2, 150));
    assert_eq!(uris[0], "casulo://sandboxes/sb_1/files/f000");
    assert_eq!(uris[149], "casulo://sandboxes/sb_2/files/f019");
    let bobs = ask(&server, BOB, "resources/list", json!({})).await;
    assert_eq!(bobs["result"]["resources"].as_array().unwrap().len(), 1);
    for wrong in ["", "x", "1", "-1.0", "1.2.3", "99999999999999999999.0"] {
        let answer = ask(&server, ANA, "resources/list", json!({"cursor": wrong})).await;
        assert_eq!(answer["error"]["code"], -32602, "{wrong}");
    }
    let templates =
        ask(&server, ANA, "resources/templates/list", json!({})).await["result"].clone();
    assert_eq!(
        templates["resourceTemplates"][0]["uriTemplate"],
        "casulo://sandboxes/{sandbox_id}/files/{+path}"
    );
    assert_eq!(templates["cacheScope"], "private");
    let discovered = ask(&server, ANA, "server/discover", json!({})).await;
    assert_eq!(discovered["result"]["capabilities"]["resources"], json!({}));
}

#[tokio::test]
async fn a_resource_is_text_only_if_that_is_all_of_it_and_hides_nothing() {
    let exact = "\u{e9}".repeat(100) + "\r\n\ttext";
    let hidden = "a\u{202e}b\u{1b}[31m";
    let files: [(&[u8], &[u8]); 4] = [
        (b"a.csv", exact.as_bytes()),
        (b"hidden.txt", hidden.as_bytes()),
        (b"p.png", b"\x89PNG\xff\0"),
        (b"empty", b""),
    ];
    let server = serving(&files).await;
    for (path, data, kind, text) in [
        ("a.csv", exact.as_bytes(), "text/csv", false),
        ("hidden.txt", hidden.as_bytes(), "text/plain", false),
        ("p.png", &b"\x89PNG\xff\0"[..], "image/png", false),
        ("empty", b"", "application/octet-stream", true),
    ] {
        let uri = format!("casulo://sandboxes/sb_1/files/{path}");
        let result =
            ask(&server, ANA, "resources/read", json!({"uri": uri})).await["result"].clone();
        assert_eq!(result["cacheScope"], "private");
        let ttl = result["ttlMs"].as_u64().unwrap();
        assert!(ttl > 0 && ttl <= 3_600_000);
        let [content] = result["contents"].as_array().unwrap().as_slice() else { panic!() };
        assert_eq!((&content["uri"], &content["mimeType"]), (&json!(uri), &json!(kind)));
        let got = match content.get("text") {
            Some(text) => text.as_str().unwrap().as_bytes().to_vec(),
            None => STANDARD.decode(content["blob"].as_str().unwrap()).unwrap(),
        };
        assert_eq!(got, data, "{path}");
        assert!(!text || content.get("text").is_some());
    }
}

#[tokio::test]
async fn a_resource_fits_into_a_result_or_the_error_tells_where_to_get_it() {
    let limits = Limits { output_bytes: 24 * 1024, ..Limits::default() };
    let server = with(limits).await;
    let around = json!({"uri": "casulo://sandboxes/sb_1/files/fits", "mimeType":
        "application/octet-stream", "text": ""})
    .to_string()
    .len();
    let fits = vec![b'x'; 24 * 1024 - around];
    let over = vec![b'x'; 24 * 1024 - around + 1];
    let huge = vec![0xff; 1 << 20];
    fill(&server.gateway, "ana", "sb_1", &[(b"fits", &fits), (b"over", &over), (b"huge", &huge)]);
    let read = async |path: &str| {
        let uri = format!("casulo://sandboxes/sb_1/files/{path}");
        ask(&server, ANA, "resources/read", json!({"uri": uri})).await
    };
    assert_eq!(
        read("fits").await["result"]["contents"][0]["text"].as_str().unwrap().len(),
        fits.len()
    );
    for path in ["over", "huge"] {
        let error = read(path).await["error"].clone();
        assert_eq!(error["code"], -32602);
        let text = error["message"].as_str().unwrap();
        assert!(text.contains(&format!("GET /v1/sandboxes/sb_1/files/{path}")), "{text}");
        assert!(text.contains("read_file"));
    }
}

#[tokio::test]
async fn what_is_no_resource_of_the_caller_is_one_error_in_each_era() {
    let server = serving(&[(b"a", b"1")]).await;
    let uris = [
        "casulo://sandboxes/sb_1/files/b",
        "casulo://sandboxes/sb_2/files/a",
        "casulo://sandboxes/sb_1/files/../a",
        "casulo://sandboxes/sb_1/files/%2e%2e/a",
        "casulo://sandboxes/sb_1/files/a%00",
        "casulo://sandboxes/sb_1/files//a",
        "casulo://sandboxes/sb_1/files/",
        "casulo://sandboxes/sb_1/files",
        "casulo://evil/sb_1/files/a",
        "file:///etc/passwd",
        "a",
        "",
    ];
    let mut messages = Vec::new();
    for uri in uris {
        let error = ask(&server, ANA, "resources/read", json!({"uri": uri})).await["error"].clone();
        assert_eq!(error["code"], -32602, "{uri} {error}");
        messages.push(error["message"].clone());
    }
    let foreign = json!({"uri": "casulo://sandboxes/sb_1/files/a"});
    let error = ask(&server, BOB, "resources/read", foreign).await["error"].clone();
    messages.push(error["message"].clone());
    messages.dedup();
    assert_eq!(messages.len(), 1, "{messages:?}");

    let session = server.send(initialize(Some(ANA))).await.headers["mcp-session-id"].clone();
    let legacy = async |uri: &str| {
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": "resources/read",
            "params": {"uri": uri}});
        server.send(in_session(post(Some(ANA), body.to_string()), &session)).await.json()
    };
    assert_eq!(legacy(uris[0]).await["error"]["code"], -32002, "as before 2026-07-28");
    let good = legacy("casulo://sandboxes/sb_1/files/a").await;
    assert_eq!(good["result"]["contents"][0]["text"], "1", "{good}");
    assert!(good["result"].get("resultType").is_none());
}

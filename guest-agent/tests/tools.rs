//! The MCP server as a client sees it, over a socket pair in place of vsock.

#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

mod common;

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use casulo_protocol::agent::{
    CommandResult, ExecuteCode, FileContent, FileList, FileWritten, ListFiles, ReadFile,
    RunCommand, WriteFile, tool,
};
use casulo_protocol::error::{ErrorClass, TaskError};
use common::{Guest, guest, text};
use rmcp::ServiceExt as _;
use rmcp::model::{CallToolRequestParams, CallToolResult, JsonObject};
use rmcp::service::{RoleClient, RunningService};
use serde::Serialize;
use serde::de::DeserializeOwned;

type Client = RunningService<RoleClient, ()>;

async fn client(guest: &Guest) -> Client {
    let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
    tokio::spawn(guest.server().serve_connection(theirs));
    ().serve(ours).await.unwrap()
}

async fn raw(client: &Client, name: &'static str, arguments: &impl Serialize) -> CallToolResult {
    let arguments: JsonObject =
        serde_json::from_value(serde_json::to_value(arguments).unwrap()).unwrap();
    let request = CallToolRequestParams::new(name).with_arguments(arguments);
    client.call_tool(request).await.unwrap()
}

async fn call<T: DeserializeOwned>(
    client: &Client,
    name: &'static str,
    arguments: &impl Serialize,
) -> Result<T, TaskError> {
    let result = raw(client, name, arguments).await;
    let value = result.structured_content.unwrap();
    if result.is_error == Some(true) {
        Err(serde_json::from_value(value).unwrap())
    } else {
        Ok(serde_json::from_value(value).unwrap())
    }
}

#[tokio::test]
async fn the_server_names_itself_and_its_tools() {
    let guest = guest();
    let client = client(&guest).await;
    let info = client.peer_info().unwrap();
    assert_eq!(info.server_info.as_ref().unwrap().name, "casulo-agent");
    let tools = client.list_all_tools().await.unwrap();
    let names: Vec<&str> = tools.iter().map(|t| &*t.name).collect();
    assert_eq!(names, ["run_command", "execute_code", "read_file", "write_file", "list_files"]);
    let unknown = CallToolRequestParams::new("format_disk");
    assert!(client.call_tool(unknown).await.is_err());
}

#[tokio::test]
async fn commands_and_code_run() {
    let guest = guest();
    let client = client(&guest).await;
    let command =
        RunCommand { argv: vec!["echo".into(), "hello".into()], options: guest.options() };
    let result: CommandResult = call(&client, tool::RUN_COMMAND, &command).await.unwrap();
    assert_eq!((text(&result.stdout), result.exit_code), ("hello\n".into(), Some(0)));

    std::fs::write(guest.folder.path().join("helper.py"), "x = 41\n").unwrap();
    let long = format!("# {}\n", "-".repeat(200_000));
    for padding in ["", long.as_str()] {
        for (language, code, wanted) in [
            ("python", "import helper, sys\nprint(helper.x + 1, sys.stdin.read())", "42 in\n"),
            ("bash", "a=(4 2); echo ${a[0]}${a[1]} $(cat)", "42 in\n"),
        ] {
            let mut options = guest.options();
            options.stdin = "in".into();
            let code = format!("{padding}{code}");
            let language = language.into();
            let code = ExecuteCode { language, code, options, session: None };
            let result: CommandResult = call(&client, tool::EXECUTE_CODE, &code).await.unwrap();
            assert_eq!(text(&result.stdout), wanted, "{}", text(&result.stderr));
        }
    }
    let options = guest.options();
    let perl = ExecuteCode { language: "perl".into(), code: "1".into(), options, session: None };
    let error = call::<CommandResult>(&client, tool::EXECUTE_CODE, &perl).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::InvalidArgument);
}

#[tokio::test]
async fn files_go_in_and_out() {
    let guest = guest();
    let client = client(&guest).await;
    let data = STANDARD.encode([0_u8, 255, 10]);
    let write = WriteFile { path: "a/b".into(), data: data.clone(), ..WriteFile::default() };
    let written: FileWritten = call(&client, tool::WRITE_FILE, &write).await.unwrap();
    assert_eq!(written.size, 3);
    let read = ReadFile { path: "a/b".into(), offset: 0, limit: 100 };
    let content: FileContent = call(&client, tool::READ_FILE, &read).await.unwrap();
    assert_eq!((content.data, content.size), (data, 3));
    let list = ListFiles { path: String::new(), recursive: true, limit: 10 };
    let listed: FileList = call(&client, tool::LIST_FILES, &list).await.unwrap();
    let names: Vec<&str> = listed.entries.iter().map(|e| e.path.as_str()).collect();
    assert_eq!(names, ["a", "a/b"]);
    let missing = ReadFile { path: "$(id)".into(), offset: 0, limit: 100 };
    let error = call::<FileContent>(&client, tool::READ_FILE, &missing).await.unwrap_err();
    assert!(error.message.contains("$(id)"), "{}", error.message);
}

#[tokio::test]
async fn wrong_arguments_are_tool_errors() {
    let guest = guest();
    let client = client(&guest).await;
    for arguments in [
        serde_json::json!({}),
        serde_json::json!({"argv": "ls"}),
        serde_json::json!({"argv": ["ls"], "sudo": true}),
        serde_json::json!({"argv": ["ls"], "options": {"timeout_ms": -1}}),
    ] {
        let error =
            call::<CommandResult>(&client, tool::RUN_COMMAND, &arguments).await.unwrap_err();
        assert_eq!(error.class, ErrorClass::InvalidArgument, "{arguments}");
    }
}

#[tokio::test]
async fn a_cancelled_call_kills_its_command_and_so_does_a_closed_connection() {
    for close in [false, true] {
        let guest = guest();
        let client = client(&guest).await;
        let pid_file = guest.folder.path().join("pid");
        let command = RunCommand {
            argv: ["sh", "-c", "echo $$ >pid; sleep 100"].map(str::to_owned).to_vec(),
            options: guest.options(),
        };
        let arguments: JsonObject =
            serde_json::from_value(serde_json::to_value(&command).unwrap()).unwrap();
        let request = CallToolRequestParams::new(tool::RUN_COMMAND).with_arguments(arguments);
        let request =
            rmcp::model::ClientRequest::CallToolRequest(rmcp::model::CallToolRequest::new(request));
        let handle = client
            .peer()
            .send_cancellable_request(request, rmcp::service::PeerRequestOptions::default())
            .await
            .unwrap();
        let pid = loop {
            match std::fs::read_to_string(&pid_file) {
                Ok(pid) if pid.ends_with('\n') => break pid,
                _ => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        };
        if close {
            client.cancel().await.unwrap();
        } else {
            handle.cancel(None).await.unwrap();
        }
        let process = std::path::Path::new("/proc").join(pid.trim());
        let gone = async {
            while process.exists() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), gone).await.unwrap();
    }
}

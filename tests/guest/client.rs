//! A client of `casulo mcp` that can say anything.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use serde_json::{Value, json};

use crate::support::{PATIENCE, casulo, wait};

pub(crate) struct Client {
    pub(crate) child: Child,
    pub(crate) stdin: Option<ChildStdin>,
    lines: Receiver<Value>,
    waiting: VecDeque<Value>,
    next: u64,
}

impl Client {
    /// `casulo mcp --host native` with `args`.
    pub(crate) fn start(args: &[&str]) -> Self {
        let mut command = casulo(["mcp", "--host", "native"]);
        command.args(args);
        Self::of(command)
    }

    pub(crate) fn of(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let _ = send.send(serde_json::from_str(&line).unwrap());
            }
        });
        let stdin = child.stdin.take();
        Self { child, stdin, lines, waiting: VecDeque::new(), next: 1 }
    }

    /// Writes bytes as they are.
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        let stdin = self.stdin.as_mut().unwrap();
        stdin.write_all(bytes).unwrap();
        stdin.flush().unwrap();
    }

    pub(crate) fn say(&mut self, message: &Value) {
        let mut line = message.to_string().into_bytes();
        line.push(b'\n');
        self.write(&line);
    }

    /// The first message for which `wanted` is true; the others wait.
    #[track_caller]
    pub(crate) fn hear(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        if let Some(at) = self.waiting.iter().position(&wanted) {
            return self.waiting.remove(at).unwrap();
        }
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(message) if wanted(&message) => return message,
                Ok(message) => self.waiting.push_back(message),
                Err(error) => panic!("no {what}: {error}; heard {:?}", self.waiting),
            }
        }
    }

    #[track_caller]
    pub(crate) fn answer(&mut self, id: u64) -> Value {
        self.hear(&format!("answer to {id}"), |m| m["id"] == id && m.get("method").is_none())
    }

    /// The messages that were heard and that nobody has asked for.
    pub(crate) fn others(&mut self) -> Vec<Value> {
        self.waiting.extend(self.lines.try_iter());
        self.waiting.drain(..).collect()
    }

    /// Sends a request without waiting; gives its id.
    pub(crate) fn request(&mut self, method: &str, mut params: Value) -> u64 {
        let id = self.next;
        self.next += 1;
        let meta = params["_meta"].as_object().cloned().unwrap_or_default();
        params["_meta"] = json!({
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientCapabilities": {},
        });
        params["_meta"].as_object_mut().unwrap().extend(meta);
        self.say(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}));
        id
    }

    pub(crate) fn begin(&mut self, tool: &str, arguments: Value) -> u64 {
        self.request("tools/call", json!({"name": tool, "arguments": arguments}))
    }

    /// Calls a tool: whether it is an error, and the result.
    #[track_caller]
    pub(crate) fn call(&mut self, tool: &str, arguments: Value) -> (bool, Value) {
        let id = self.begin(tool, arguments);
        self.result(id)
    }

    #[track_caller]
    pub(crate) fn result(&mut self, id: u64) -> (bool, Value) {
        let answer = self.answer(id);
        let result = &answer["result"];
        assert!(result.is_object(), "{answer}");
        let error = result["isError"] == true;
        let structured = result.get("structuredContent").is_some();
        if !structured && !error {
            return (error, result.clone());
        }
        // What is structured must fit the output schema, and an error does not.
        assert_ne!(structured, error, "{answer}");
        let text: Value =
            serde_json::from_str(result["content"][0]["text"].as_str().unwrap()).unwrap();
        assert!(error || text == result["structuredContent"], "both forms hold the same");
        (error, text)
    }

    #[track_caller]
    pub(crate) fn good(&mut self, tool: &str, arguments: Value) -> Value {
        let (error, result) = self.call(tool, arguments);
        assert!(!error, "{tool}: {result}");
        result
    }

    /// An error of that class; gives its message.
    #[track_caller]
    pub(crate) fn bad(&mut self, tool: &str, arguments: Value, class: &str) -> String {
        let (error, result) = self.call(tool, arguments);
        assert!(error && result["class"] == class, "{tool}: {result}");
        result["message"].as_str().unwrap().to_owned()
    }

    #[track_caller]
    pub(crate) fn sandbox(&mut self) -> String {
        self.good("create_sandbox", json!({}))["sandbox_id"].as_str().unwrap().to_owned()
    }

    pub(crate) fn python(&mut self, sandbox: &str, code: &str) -> Value {
        let arguments = json!({"language": "python", "code": code, "sandbox_id": sandbox});
        self.good("execute_code", arguments)
    }

    pub(crate) fn bash(&mut self, sandbox: &str, command: &str) -> Value {
        self.good("run_command", json!({"command": command, "sandbox_id": sandbox}))
    }

    /// Closes the input and waits for the end.
    #[track_caller]
    pub(crate) fn end(mut self) {
        self.stdin = None;
        assert!(wait(&mut self.child).success());
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! What the calls of `tests/mcp/calls.json` must give, to every client alike.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::{Map, Value};

/// The tools, in the order in which the server lists them.
const TOOLS: [&str; 10] = [
    "run_command",
    "execute_code",
    "read_file",
    "write_file",
    "list_files",
    "start_process",
    "poll_process",
    "stop_process",
    "create_sandbox",
    "destroy_sandbox",
];
/// Revisions of MCP.
const OLDER: &str = "2025-11-25";
const NEWEST: &str = "2026-07-28";
/// Most bytes of a result.
const MOST: usize = 24 * 1024;
/// Fields that differ from call to call.
const VOLATILE: [&str; 6] =
    ["sandbox_id", "duration_ms", "stdout_file", "stderr_file", "modified", "uri"];

/// One call and what it must give.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Step {
    pub(super) tool: String,
    pub(super) arguments: Map<String, Value>,
    /// Fields of the result, which may have more.
    gives: Option<Map<String, Value>>,
    /// Class of the error instead.
    error: Option<String>,
}

impl Step {
    /// Whether it needs nothing of the calls before it.
    pub(super) fn stands_alone(&self) -> bool {
        self.tool != "create_sandbox" && !self.arguments.values().any(|v| v == "$sandbox_id")
    }

    /// Judges a result; gives what all clients must see alike.
    pub(super) fn judge(&self, answer: &Answer) -> Result<Value> {
        let text: Value = serde_json::from_str(&answer.text)
            .with_context(|| format!("the text is no JSON: {:?}", answer.text))?;
        match (&self.gives, &self.error) {
            (Some(gives), None) => {
                ensure!(!answer.is_error, "{} is an error: {text}", self.tool);
                ensure!(
                    answer.structured.as_ref() == Some(&text),
                    "the forms of a result differ: {:?} and {text}",
                    answer.structured
                );
                for (name, value) in gives {
                    ensure!(text.get(name) == Some(value), "{name} is not {value} in {text}");
                }
            }
            (None, Some(class)) => {
                ensure!(answer.is_error, "{} is no error: {text}", self.tool);
                ensure!(text["class"] == class.as_str(), "not of class {class}: {text}");
            }
            _ => bail!("a call gives either a result or an error"),
        }
        ensure!(answer.text.len() <= MOST, "{} bytes are too many", answer.text.len());
        Ok(steady(text))
    }
}

/// A value without what differs from call to call.
fn steady(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let kept = map.into_iter().filter(|(name, _)| !VOLATILE.contains(&name.as_str()));
            Value::Object(kept.map(|(name, value)| (name, steady(value))).collect())
        }
        Value::Array(list) => Value::Array(list.into_iter().map(steady).collect()),
        other => other,
    }
}

/// What a client saw of the server.
#[derive(Debug, Deserialize)]
struct Hello {
    server: Option<String>,
    protocol: String,
    tools: Vec<String>,
}

/// What a client got from one call.
#[derive(Debug, Deserialize)]
pub(super) struct Answer {
    pub(super) structured: Option<Value>,
    pub(super) text: String,
    pub(super) is_error: bool,
}

/// The calls.
pub(super) struct Calls(Vec<Step>);

/// What a client got, judged.
pub(super) struct Got {
    protocol: String,
    results: Vec<Value>,
}

impl Calls {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let steps = serde_json::from_slice(&text).with_context(|| path.display().to_string())?;
        Ok(Self(steps))
    }

    pub(super) fn steps(&self) -> &[Step] {
        &self.0
    }

    /// Judges what a client printed.
    pub(super) fn judge(&self, printed: &str) -> Result<Got> {
        let mut lines = printed.lines();
        let hello = lines.next().context("the client printed nothing")?;
        let hello: Hello = serde_json::from_str(hello).with_context(|| hello.to_owned())?;
        ensure!(hello.tools == TOOLS, "other tools, or another order: {:?}", hello.tools);
        ensure!(
            hello.server.as_deref() == Some("casulo"),
            "the server is called {:?}",
            hello.server
        );
        let mut results = Vec::new();
        for step in &self.0 {
            let line = lines.next().context("the client did not make all calls")?;
            let answer: Answer = serde_json::from_str(line).with_context(|| line.to_owned())?;
            let result = step.judge(&answer);
            let call = || format!("{} {}", step.tool, Value::from(step.arguments.clone()));
            results.push(result.with_context(call)?);
        }
        ensure!(lines.next().is_none(), "the client made more calls than it should");
        Ok(Got { protocol: hello.protocol, results })
    }
}

impl Got {
    /// The client and the server agreed on a right revision, and on the newest where they must.
    pub(super) fn revision(&self, newest: bool) -> Result<()> {
        let right = self.protocol == NEWEST || !newest && self.protocol == OLDER;
        ensure!(right, "they agreed on revision {}", self.protocol);
        Ok(())
    }
}

/// What the first client got.
#[derive(Default)]
pub(super) struct Seen(Option<Vec<Value>>);

impl Seen {
    /// Every client must get the same.
    pub(super) fn same(&mut self, got: Got) -> Result<()> {
        match &self.0 {
            None => self.0 = Some(got.results),
            Some(first) => {
                for (one, other) in first.iter().zip(&got.results) {
                    ensure!(one == other, "other clients got {one}, this one {other}");
                }
            }
        }
        Ok(())
    }

    /// The result of one of the calls.
    pub(super) fn of(&self, step: usize) -> Option<&Value> {
        self.0.as_ref()?.get(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(text: &str) -> Step {
        serde_json::from_str(text).unwrap()
    }

    fn answer(value: &Value, is_error: bool) -> Answer {
        Answer { structured: Some(value.clone()), text: value.to_string(), is_error }
    }

    #[test]
    fn a_result_must_have_what_the_call_gives_in_both_forms() {
        let step = step(r#"{"tool": "t", "arguments": {}, "gives": {"a": 1}}"#);
        let right = serde_json::json!({"a": 1, "b": 2, "duration_ms": 5});
        let steady = step.judge(&answer(&right, false)).unwrap();
        assert_eq!(steady, serde_json::json!({"a": 1, "b": 2}));
        assert!(step.judge(&answer(&right, true)).is_err());
        assert!(step.judge(&answer(&serde_json::json!({"a": 2}), false)).is_err());
        let mut torn = answer(&right, false);
        torn.structured = None;
        assert!(step.judge(&torn).is_err());
        torn = answer(&serde_json::json!({"a": 1, "b": "x".repeat(MOST)}), false);
        assert!(step.judge(&torn).is_err());
    }

    #[test]
    fn an_error_must_be_of_its_class() {
        let step = step(r#"{"tool": "t", "arguments": {}, "error": "one"}"#);
        assert!(step.judge(&answer(&serde_json::json!({"class": "one"}), true)).is_ok());
        assert!(step.judge(&answer(&serde_json::json!({"class": "two"}), true)).is_err());
        assert!(step.judge(&answer(&serde_json::json!({"class": "one"}), false)).is_err());
    }

    #[test]
    fn all_clients_must_get_the_same() {
        let got = |n: u32| Got { protocol: NEWEST.into(), results: vec![n.into()] };
        let mut seen = Seen::default();
        seen.same(got(1)).unwrap();
        seen.same(got(1)).unwrap();
        assert!(seen.same(got(2)).is_err());
        assert!(got(1).revision(true).is_ok());
        let older = Got { protocol: OLDER.into(), results: Vec::new() };
        assert!(older.revision(false).is_ok() && older.revision(true).is_err());
    }
}

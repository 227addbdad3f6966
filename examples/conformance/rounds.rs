//! Answers that need the client's input first, over several rounds (MCP 2026-07-28, SEP-2322).

use rmcp::ErrorData;
use rmcp::model::{ClientCapabilities, InputRequiredResult, InputResponses};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

/// What to do with a request.
pub(crate) enum Next {
    Ask(InputRequiredResult),
    Answer,
}

/// Who asks for what, and a key that keeps clients from making up how far they are.
pub(crate) struct Rounds {
    /// For each tool or prompt the names of the inputs of each round.
    rounds: Map<String, Value>,
    /// The requests for inputs by name.
    inputs: Map<String, Value>,
    key: [u8; 32],
}

impl Rounds {
    pub(crate) fn new(rounds: Map<String, Value>, inputs: Map<String, Value>) -> Self {
        let mut key = [0; 32];
        // The kernel's generator fails only before it is ready, long before any program runs.
        let _ = rustix::rand::getrandom(&mut key[..], rustix::rand::GetRandomFlags::empty());
        Self { rounds, inputs, key }
    }

    /// Names of what asks.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.rounds.keys().map(String::as_str)
    }

    /// How to go on with the request `name`; `None` when it asks for nothing.
    pub(crate) fn next(
        &self,
        name: &str,
        responses: Option<&InputResponses>,
        state: Option<&str>,
        client: &ClientCapabilities,
    ) -> Result<Option<Next>, ErrorData> {
        let Some(rounds) = self.rounds.get(name).and_then(Value::as_array) else {
            return Ok(None);
        };
        let round = match state {
            Some(state) => self.opened(name, state)?,
            None => 0,
        };
        let wanted = |round: usize| {
            let names = rounds.get(round).and_then(Value::as_array).into_iter().flatten();
            names.filter_map(Value::as_str).filter(|input| self.may_ask(input, client))
        };
        let given = |input| responses.and_then(|r| r.get(input)).is_some_and(Value::is_object);
        let ask = |round| {
            let inputs: Map<String, Value> = wanted(round)
                .filter_map(|input| Some((input.to_owned(), self.inputs.get(input)?.clone())))
                .collect();
            serde_json::from_value(json!({
                "resultType": "input_required",
                "inputRequests": inputs,
                "requestState": self.sealed(name, round),
            }))
            .map(|result| Some(Next::Ask(result)))
            .map_err(|e| ErrorData::internal_error(e.to_string(), None))
        };
        if !wanted(round).all(given) {
            return ask(round);
        }
        if round + 1 < rounds.len() {
            return ask(round + 1);
        }
        Ok(Some(Next::Answer))
    }

    /// Whether the client has said that it can answer such a request.
    fn may_ask(&self, input: &str, client: &ClientCapabilities) -> bool {
        match self.inputs.get(input).and_then(|request| request["method"].as_str()) {
            Some("elicitation/create") => client.elicitation.is_some(),
            Some("sampling/createMessage") => client.sampling.is_some(),
            Some("roots/list") => client.roots.is_some(),
            _ => false,
        }
    }

    fn sealed(&self, name: &str, round: usize) -> String {
        let mac = Sha256::new()
            .chain_update(self.key)
            .chain_update(format!("{name} {round}"))
            .finalize()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>();
        format!("{round}-{mac}")
    }

    fn opened(&self, name: &str, state: &str) -> Result<usize, ErrorData> {
        let round = state.split_once('-').and_then(|(round, _)| round.parse().ok());
        round
            .filter(|round| self.sealed(name, *round) == state)
            .ok_or_else(|| ErrorData::invalid_params("this requestState is not ours", None))
    }
}

//! JSON Schemas of what callers send and receive, for those who write clients in other languages.
//!
//! The files in `protocol/schema/` are these schemas; a test keeps them equal.

use schemars::generate::SchemaSettings;
use serde_json::Value;

use crate::error::TaskError;
use crate::event::Event;
use crate::image::Manifest;
use crate::result::RunResult;
use crate::spec::{RunSpec, SandboxSpec};

fn schema<T: schemars::JsonSchema>() -> Value {
    SchemaSettings::draft2020_12().into_generator().into_root_schema_for::<T>().to_value()
}

/// Every exported schema with its name.
pub fn all() -> [(&'static str, Value); 6] {
    [
        ("sandbox-spec", schema::<SandboxSpec>()),
        ("run-spec", schema::<RunSpec>()),
        ("run-result", schema::<RunResult>()),
        ("task-error", schema::<TaskError>()),
        ("event", schema::<Event>()),
        ("image-manifest", schema::<Manifest>()),
    ]
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_files_are_the_schemas() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema");
        for (name, schema) in all() {
            let text = serde_json::to_string_pretty(&schema).unwrap() + "\n";
            let file = folder.join(name).with_extension("json");
            if std::env::var_os("CASULO_UPDATE_GOLDEN").is_some() {
                std::fs::create_dir_all(&folder).unwrap();
                std::fs::write(&file, &text).unwrap();
            }
            assert_eq!(
                std::fs::read_to_string(&file).unwrap(),
                text,
                "{name} changed; if that is meant, run the tests with CASULO_UPDATE_GOLDEN=1"
            );
        }
    }

    #[test]
    fn unknown_fields_of_requests_are_refused() {
        let spec = serde_json::json!({"image": "base", "memory": 512});
        let error = serde_json::from_value::<SandboxSpec>(spec).unwrap_err();
        assert!(error.to_string().contains("unknown field `memory`"), "{error}");
    }
}

//! An image on disk: a folder that holds [`MANIFEST`] and one read-only erofs file per layer.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Name of the manifest in an image's folder.
pub const MANIFEST: &str = "image.json";

/// Version of the manifest's format.
pub const FORMAT: u32 = 1;

/// The manifest. An image's digest is the SHA-256 of its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// Name under which the image was built, such as `base`.
    pub name: String,
    /// `amd64`.
    pub architecture: String,
    /// Layers from the lowest to the highest.
    pub layers: Vec<Layer>,
    /// Environment of every command, before the caller's.
    pub env: BTreeMap<String, String>,
    /// Working folder, when the image wants another than Casulo's default.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub workdir: Option<String>,
    /// User of commands, when the image wants another than uid 1000.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub user: Option<String>,
    /// Put before every command.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub entrypoint: Vec<String>,
    /// `name=version` of every package, sorted.
    pub packages: Vec<String>,
    /// Version of the agent protocol that the image's boot volume must speak.
    pub agent_protocol: u32,
    /// Oldest guest kernel, as `major.minor`.
    pub min_kernel: String,
}

/// One layer: a file `<sha256>.erofs` in the store's `layers/` folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    /// SHA-256 of the file, lower-case hex.
    pub sha256: String,
    /// Bytes.
    pub size: u64,
}

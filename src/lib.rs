//! Casulo runs code that nobody has reviewed in a microVM that exists for one task.
//!
//! ```no_run
//! # async fn example() -> Result<(), casulo::Error> {
//! use casulo::{Files, Runtime, RuntimeConfig};
//! use casulo::protocol::spec::{RunSpec, SandboxSpec};
//!
//! let home = std::path::Path::new("/opt/casulo/share/casulo");
//! let config = RuntimeConfig::in_home(home, "/opt/casulo/bin/casulo-vmm".into());
//! let runtime = Runtime::open(config)?;
//! let sandbox = runtime.sandbox(SandboxSpec::default()).await?;
//! let command = RunSpec::new(["python3", "-c", "print(6*7)"]);
//! let result = sandbox.run_captured(&command, None, 64 * 1024, Files::Ignore).await?;
//! assert_eq!(result.stdout, "42\n");
//! sandbox.close(Files::Ignore).await?;
//! # Ok(())
//! # }
//! ```
//!
//! The library has no global state, installs no signal handlers, and runs inside the caller's tokio.

pub use casulo_protocol as protocol;

mod agent;
mod boot;
#[cfg(feature = "http")]
pub mod bridge;
mod capture;
#[cfg(feature = "cli")]
pub mod cli;
pub mod emulated;
mod error;
mod events;
mod evidence;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(feature = "gateway")]
pub mod gateway;
pub mod image;
pub mod kvm;
mod lines;
mod output;
mod runtime;
mod sandbox;
pub mod shares;
#[cfg_attr(not(feature = "gateway"), expect(dead_code, reason = "the gateway uses all of it"))]
mod text;
mod vm;
#[cfg(feature = "wrap")]
pub mod wrap;

pub use agent::exec::{Control, Stdio};
pub use agent::{Execution, Program};
pub use boot::BootPhase;
pub use error::Error;
pub use events::Events;
pub use evidence::Evidence;
pub use output::Output;
pub use runtime::{Runtime, RuntimeConfig};
pub use sandbox::{Files, Sandbox};

//! What crosses a process or VM border in Casulo, and nothing else.
//!
//! Three borders, three groups of modules:
//!
//! * caller and Casulo: [`spec`], [`result`], [`event`], [`error`]: plain serde types shared by the
//!   library, `--json`, the MCP gateway and policies;
//! * `casulo` and `casulo-vmm`, over an inherited socket pair: [`vmm`], [`machine`];
//! * `casulo` and the guest agent, over vsock: [`agent`] (control) and [`stream`] (bulk bytes).
//!
//! [`image`] describes an image on disk. Nothing here does I/O, so that every side can use it.

pub mod agent;
pub mod error;
pub mod event;
pub mod image;
pub mod machine;
pub mod result;
pub mod schema;
pub mod spec;
pub mod stream;
pub mod vmm;

/// Makes every panic of this process end it at once, as `panic = "abort"` would.
///
/// A thread that unwinds would leave a VMM or a process 1 that half works. It is a hook and not a
/// profile setting because the test harness needs unwinding, and two settings would mean two builds
/// of every dependency.
pub fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        std::process::abort();
    }));
}

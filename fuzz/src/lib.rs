//! What the fuzz targets share: a guest's driver, good and bad, in front of a real device.
//!
//! A target decodes its input into a program ([`program`]): a list of what a guest, and where there is
//! one its peer on the host, does. [`machine`] carries it out against the real transport, the real worker
//! and the real device, all on one thread, so that an input always does the same. [`limits`] makes
//! growth without bound a finding.

pub mod limits;
pub mod machine;
pub mod program;

pub use machine::Machine;

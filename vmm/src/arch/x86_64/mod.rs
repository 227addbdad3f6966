//! x86-64: how the machine looks at the first instruction of the kernel.

pub mod boot;
pub mod cpuid;
pub mod kernel;
pub mod mptable;
pub mod registers;

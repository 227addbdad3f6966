//! What is special to a processor architecture. There is one so far.

pub mod x86_64;

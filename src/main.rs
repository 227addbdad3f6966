//! The `casulo` command.
fn main() {}

//! Placeholder until the first commit of this part.
fn main() {}

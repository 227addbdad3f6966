//! The Casulo library.

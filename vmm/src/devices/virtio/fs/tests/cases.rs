//! Ten thousand generated cases, as a hostile driver sends them.
//!
//! A case is a few messages, in slices of memory of uneven sizes; a folder serves for many cases, so that
//! they build on what earlier ones have left. Beside it lies what must never be read or changed. Another
//! seed: `CASULO_FS_SEED`, a number.

use super::random::{Message, message, shaped};
use super::*;

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

const FOLDERS: u64 = 25;
const CASES_IN_ONE: usize = 400;

fn case() -> impl Strategy<Value = Vec<Message>> {
    let one = proptest::prop_oneof![1 => message().boxed(), 3 => shaped().boxed()];
    proptest::collection::vec(one, 1..10)
}

#[test]
fn ten_thousand_hostile_cases_leave_the_canary_alone() {
    let seed = std::env::var("CASULO_FS_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or(1);
    let (mut served, mut refused) = (0_u64, 0_u64);
    for folder in 0..FOLDERS {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        bytes[8..16].copy_from_slice(&folder.to_le_bytes());
        let random = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let mut runner = TestRunner::new_with_rng(Config::default(), random);
        let strategy = case();
        let mut world = World::new();
        for number in 0..CASES_IN_ONE {
            // An earlier case may have unmounted it. What the guest knew before is forgotten, so the
            // shares have nodes 2 to 5.
            if number % 8 == 0 {
                world.init();
                for path in ["rw", "ro"] {
                    let parent = world.node(path);
                    for name in ["a.txt", "sub", "link", "fifo"] {
                        let _ = world.lookup(parent, name);
                    }
                }
            }
            let messages = strategy.new_tree(&mut runner).unwrap().current();
            for message in &messages {
                match world.raw(&message.bytes(), message.room) {
                    Ok(reply) => {
                        served += 1;
                        let needle = b"contents of outside";
                        let reply = reply.unwrap_or_default();
                        let leak = reply.windows(needle.len()).any(|window| window == needle);
                        assert!(!leak, "seed {seed}, folder {folder}, case {number}: {message:?}");
                    }
                    Err(_) => refused += 1,
                }
            }
            let unharmed = world.is_protected();
            assert!(unharmed, "seed {seed}, folder {folder}, case {number}: {messages:?}");
        }
    }
    // They are no test if all of them fail at the door.
    assert!(served > 5_000 && refused > 5_000, "{served} {refused}");
}

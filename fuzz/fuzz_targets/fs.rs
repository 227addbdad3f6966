//! The FUSE server, over shares that hold what is known to lead out of them.
#![no_main]

#[path = "fs/message.rs"]
mod message;
#[path = "fs/world.rs"]
mod world;

use arbitrary::Arbitrary;
use casulo_fuzz::Machine;
use casulo_fuzz::limits::Limits;
use casulo_fuzz::program::{Op, Setup};
use message::{Message, Number, Session};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use world::World;

/// Descriptors that this process may have: few, so that the guest meets the limit of its share of them.
const DESCRIPTORS: u64 = 160;
/// The guest's share is seven eighths; beside them are those of transport, worker and shares.
const MOST: i32 = 140 + 16;

#[derive(Arbitrary, Debug)]
struct Program {
    /// Whether the guest does not say INIT by itself.
    cold: bool,
    setup: Setup,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    /// Messages with the fields that their operations have, to a device that works.
    Messages(Vec<Message>),
    /// Any message.
    Raw { operation: u8, node: Number, body: Vec<u8>, length: Option<u32>, room: u16 },
    /// Something done on the host meanwhile.
    Host(world::HostOp),
    /// Anything else.
    Other(Op),
}

fn lower_the_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current > DESCRIPTORS) {
        let lower = Rlimit { current: Some(DESCRIPTORS), maximum: limit.maximum };
        setrlimit(Resource::Nofile, lower).expect("a lower limit");
    }
}

libfuzzer_sys::fuzz_target!(|program: Program| {
    lower_the_limit();
    let world = World::fresh();
    let limits = Limits::new();
    let mut machine = Machine::new(Box::new(world.device()));
    machine.bring_up(&program.setup);
    let mut session = Session::default();
    if !program.cold {
        session.start(&mut machine);
    }
    for step in &program.steps {
        match step {
            Step::Messages(messages) => {
                if machine.recover(&program.setup) {
                    session = Session::default();
                    session.start(&mut machine);
                }
                messages.iter().take(32).for_each(|message| session.send(&mut machine, message));
            }
            Step::Raw { operation, node, body, length, room } => {
                let node = session.node(node);
                let operation = u32::from(*operation);
                session.raw(&mut machine, 1, operation, node, body, *length, u32::from(*room), 0);
            }
            Step::Host(op) => world.host(op),
            Step::Other(op) => machine.run(op),
        }
    }
    assert!(limits.descriptors() <= MOST, "{} descriptors", limits.descriptors());
    world.check(&machine);

    // Whatever happened, a driver can reset the device and use it.
    machine.bring_up(&Setup { features: 0xff, halved: [0; 3] });
    let mut session = Session::default();
    session.start(&mut machine);
    assert!(session.knows_shares(), "a good driver mounts the shares");
    drop((machine, session));
    limits.check();
});

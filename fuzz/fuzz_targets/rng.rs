//! The entropy device.
#![no_main]

use arbitrary::Arbitrary;
use casulo_fuzz::Machine;
use casulo_fuzz::limits::Limits;
use casulo_fuzz::program::{Op, Setup};
use casulo_vmm::devices::virtio::rng::RngDevice;

#[derive(Arbitrary, Debug)]
struct Program {
    setup: Setup,
    ops: Vec<Op>,
}

libfuzzer_sys::fuzz_target!(|program: Program| {
    let limits = Limits::new();
    let mut machine = Machine::new(Box::new(RngDevice::new()));
    machine.bring_up(&program.setup);
    for op in &program.ops {
        machine.run(op);
    }
    // Whatever happened, a driver can reset the device and use it.
    machine.bring_up(&Setup { features: 0xff, halved: [0; 3] });
    let (written, bytes) = machine.request(0, &[], &[24, 40], true).expect("an answer");
    assert_eq!(written, 64);
    assert!(bytes.iter().any(|byte| *byte != 0));
    drop(machine);
    limits.check();
});

//! The transport, from power-on: registers in any order, with a device of three queues behind them.
#![no_main]

use casulo_fuzz::Machine;
use casulo_fuzz::limits::Limits;
use casulo_fuzz::program::{Op, Setup};
use casulo_vmm::devices::virtio::vsock::VsockDevice;

libfuzzer_sys::fuzz_target!(|ops: Vec<Op>| {
    let limits = Limits::new();
    let (device, handle, events) = VsockDevice::new(3, &[]).expect("a device");
    let mut machine = Machine::new(Box::new(device));
    for op in &ops {
        machine.run(op);
    }
    // Whatever happened, a driver can reset the device and use it.
    machine.bring_up(&Setup { features: 0xff, halved: [0; 3] });
    assert!(!machine.is_broken());
    drop((machine, handle, events));
    limits.check();
});

//! Every way in which a guest ends, and what the VMM tells of it.

#![allow(clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use casulo_protocol::vmm::{
    AccessKind, Diagnosis, ExitReason, GuestEnd, Message, Request, UnknownAccess, VmConfig,
};
use common::{CODE, Code, Vmm, config, has_kvm};

/// Runs the code to its end.
fn end_of(config: VmConfig, code: Code) -> (GuestEnd, String) {
    let mut vmm = Vmm::start(config, code);
    match vmm.receive() {
        Some(Message::Exited { end, console, .. }) => {
            assert!(vmm.wait().success());
            (end, console)
        }
        other => panic!("unexpected {other:?}"),
    }
}

fn diagnosis(vmm: &Vmm) -> Diagnosis {
    vmm.request(&Request::Diagnose, &[]);
    match vmm.receive() {
        Some(Message::Diagnosis(diagnosis)) => diagnosis,
        other => panic!("unexpected {other:?}"),
    }
}

/// Waits until the guest has said so much.
fn wait_for_console(vmm: &Vmm, text: &str) {
    loop {
        vmm.request(&Request::Report, &[]);
        match vmm.receive() {
            Some(Message::Report { console, .. }) if console == text => return,
            Some(Message::Report { .. }) => std::thread::yield_now(),
            other => panic!("unexpected {other:?}"),
        }
    }
}

fn access(kind: AccessKind, address: u64, written: Option<u64>, count: u64) -> UnknownAccess {
    let (write, value) = (written.is_some(), written.unwrap_or(0));
    UnknownAccess { kind, address, write, value, count }
}

#[test]
fn a_triple_fault_tells_where_the_guest_was() {
    if has_kvm() {
        let code = Code::new().print(b"last words");
        let place = CODE + code.length();
        // ud2, and no handler for it.
        let (end, console) = end_of(config(), code.bytes(&[0x0f, 0x0b]));
        assert_eq!((end.reason, console.as_str()), (ExitReason::TripleFault, "last words"));
        let Some(state) = end.vcpu else {
            // AMD's processors leave no registers behind.
            assert!(std::fs::read_to_string("/proc/cpuinfo").unwrap().contains("AuthenticAMD"));
            return;
        };
        assert_eq!((state.vcpu, state.privilege, state.halted), (0, 0, false));
        let registers = state.registers;
        assert_eq!(registers.rip, place);
        assert_eq!((registers.rsp, registers.cr3), (0x8ff0, 0x9000));
        // Paging and protected mode; physical address extension.
        assert_eq!(registers.cr0 & 0x8000_0001, 0x8000_0001);
        assert_eq!(registers.cr4 & 0x20, 0x20);
        assert_eq!(registers.rflags & 0x202, 2);
    }
}

#[test]
fn an_instruction_that_kvm_cannot_run_is_an_internal_error() {
    if has_kvm() {
        // There is nothing to execute at the address of a device that is not there.
        let nowhere = 0xd010_0000;
        let code = Code::new().map_devices().print(b"x").jump(nowhere);
        let (end, console) = end_of(config(), code);
        assert_eq!(console, "x");
        let ExitReason::InternalError { suberror, .. } = end.reason else {
            panic!("{end:?}");
        };
        assert_eq!(suberror, 1);
        assert_eq!(end.vcpu.unwrap().registers.rip, nowhere);
        assert!(end.reason.to_string().contains("cannot emulate"));
    }
}

#[test]
fn a_reset_is_an_orderly_end() {
    if has_kvm() {
        let (end, _) = end_of(config(), Code::new().reset());
        assert_eq!(end.reason, ExitReason::Reset);
        assert_eq!((end.vcpu.unwrap().vcpu, end.accesses), (0, vec![]));
    }
}

#[test]
fn a_guest_that_halts_for_ever_has_ended() {
    if has_kvm() {
        // The second CPU was never started: nobody can wake the first.
        for cpus in [1, 2] {
            let config = VmConfig { cpus, ..config() };
            let (end, console) = end_of(config, Code::new().print(b"bye").halt());
            assert_eq!((end.reason, console.as_str()), (ExitReason::Halted, "bye"));
            let state = end.vcpu.unwrap();
            assert!(state.halted && state.stopped_for_ever());
        }
    }
}

#[test]
fn a_panic_is_a_panic_however_the_guest_ends() {
    if has_kvm() {
        let panic = || Code::new().print(b"Kernel panic - not syncing: x\n");
        for code in [panic().reset(), panic().halt(), panic().bytes(&[0x0f, 0x0b])] {
            assert_eq!(end_of(config(), code).0.reason, ExitReason::Panic);
        }
    }
}

#[test]
fn a_guest_that_waits_or_works_has_not_ended() {
    if has_kvm() {
        for (code, halted) in [(Code::new().idle(), true), (Code::new().spin(), false)] {
            let vmm = Vmm::start(VmConfig { cpus: 2, ..config() }, code);
            // Long enough for the VMM to look more than once.
            std::thread::sleep(casulo_vmm::halt::PERIOD * 3);
            let found = diagnosis(&vmm);
            assert_eq!(found.vcpus.len(), 2);
            let (boot, other) = (&found.vcpus[0], &found.vcpus[1]);
            assert_eq!((boot.vcpu, boot.halted), (0, halted));
            assert!(other.waits_for_start && !boot.stopped_for_ever());
        }
    }
}

#[test]
fn a_diagnosis_tells_where_a_guest_hangs() {
    if has_kvm() {
        let code = Code::new().print(b"before").out(0x1234, 9);
        let place = CODE + code.length();
        let vmm = Vmm::start(config(), code.spin());
        wait_for_console(&vmm, "before");
        loop {
            let found = diagnosis(&vmm);
            assert_eq!(found.vcpus.len(), 1);
            // Entropy and sockets; no driver has set one up.
            let devices: Vec<u32> = found.devices.iter().map(|device| device.device).collect();
            assert!(devices.contains(&4) && devices.contains(&19), "{devices:?}");
            assert!(!found.devices.iter().any(|device| device.driver_ok()));
            if found.vcpus[0].registers.rip == place {
                assert_eq!(found.console, "before");
                assert_eq!(found.accesses, [access(AccessKind::Port, 0x1234, Some(9), 1)]);
                return;
            }
        }
    }
}

#[test]
fn absent_ports_and_memory_are_told_with_what_was_written() {
    if has_kvm() {
        let code = Code::new()
            .map_devices()
            .out(0x1234, 1)
            .out(0x1234, 2)
            .print_port(0x1234)
            .poke(0xd010_0000, 7)
            .reset();
        let (end, console) = end_of(config(), code);
        assert_eq!((end.reason, console.as_str()), (ExitReason::Reset, "\u{fffd}"));
        assert_eq!(
            end.accesses,
            [
                access(AccessKind::Port, 0x1234, Some(2), 2),
                access(AccessKind::Port, 0x1234, None, 1),
                access(AccessKind::Memory, 0xd010_0000, Some(7), 1),
            ]
        );
    }
}

#[test]
fn a_guest_that_tries_every_port_is_told_within_bounds() {
    if has_kvm() {
        // mov dx, 0x1000; out dx, al; inc dx; cmp dx, 0x1400; jne to the out
        let every = [0x66, 0xba, 0, 0x10, 0xee, 0x66, 0xff, 0xc2, 0x66, 0x81, 0xfa, 0, 0x14, 0x75];
        let code = Code::new().bytes(&every).bytes(&[0xf5]).print(b"all").reset();
        let (end, console) = end_of(config(), code);
        assert_eq!((end.reason, console.as_str()), (ExitReason::Reset, "all"));
        assert_eq!(end.accesses.len(), 32);
        assert_eq!(end.accesses[31].address, 0x101f);
    }
}

#[test]
fn an_unknown_msr_is_a_general_protection_fault_and_is_told() {
    if has_kvm() {
        // In the range that hypervisors use, and nobody's.
        const NOBODYS: u32 = 0x4fff_1234;
        for (code, written) in
            [(Code::new().rdmsr(NOBODYS), None), (Code::new().wrmsr(NOBODYS, 5), Some(5))]
        {
            let (end, console) = end_of(config(), code.print(b"went on").reset());
            // Without a handler the fault is three at once.
            assert_eq!((end.reason, console.as_str()), (ExitReason::TripleFault, ""));
            let told = [access(AccessKind::Msr, NOBODYS.into(), written, 1)];
            // KVM before Linux 5.10, and some that only look like KVM, keep it to themselves.
            if reports_unknown_msrs() {
                assert_eq!(end.accesses, told);
            } else {
                eprintln!("this KVM does not report unknown registers: only the fault was tested");
            }
        }
    }
}

fn reports_unknown_msrs() -> bool {
    kvm_ioctls::Kvm::new().is_ok_and(|kvm| kvm.check_extension(kvm_ioctls::Cap::X86UserSpaceMsr))
}

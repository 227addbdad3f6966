//! The machine as a guest of a few instructions sees it.

#![allow(clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use casulo_protocol::vmm::{ExitReason, Message, Request, VmConfig};
use common::{Code, Vmm, config, has_kvm};

const VIRTIO: u64 = 0xd000_0000;

/// Runs the code to the end; returns the reason and the console.
fn run(config: VmConfig, code: Code) -> (ExitReason, String) {
    let mut vmm = Vmm::start(config, code);
    match vmm.receive() {
        Some(Message::Exited { end, console, counters }) => {
            assert!(counters.exits >= counters.mmio_exits + counters.pio_exits);
            assert!(counters.build_us > 0 && counters.page_faults > 0);
            assert!(vmm.wait().success());
            (end.reason, console)
        }
        other => panic!("unexpected {other:?}"),
    }
}

#[test]
fn console_and_orderly_reset() {
    if has_kvm() {
        let ended = run(config(), Code::new().print(b"hello").reset());
        assert_eq!(ended, (ExitReason::Reset, "hello".to_owned()));
    }
}

#[test]
fn a_reset_after_a_panic_is_a_panic() {
    if has_kvm() {
        let text = b"Kernel panic - not syncing: no init\n";
        assert_eq!(run(config(), Code::new().print(text).reset()).0, ExitReason::Panic);
    }
}

#[test]
fn an_exception_without_handler_is_a_triple_fault() {
    if has_kvm() {
        // ud2
        let code = Code::new().print(b"x").bytes(&[0x0f, 0x0b]);
        assert_eq!(run(config(), code), (ExitReason::TripleFault, "x".to_owned()));
    }
}

#[test]
fn absent_ports_read_as_ones_and_swallow_writes() {
    if has_kvm() {
        let code = Code::new().out(0x1234, 1).print_port(0x1234).out(0x64, 0xd1).reset();
        assert_eq!(run(config(), code).1, "\u{fffd}");
    }
}

#[test]
fn registers_are_read_from_the_page_and_cannot_be_written() {
    if has_kvm() {
        let code = Code::new()
            .map_devices()
            .print_word(VIRTIO)
            .poke(VIRTIO, 0x6c69_7665)
            .print_word(VIRTIO)
            // The status register by the state machine: DRIVER needs ACKNOWLEDGE.
            .poke(VIRTIO + 0x70, 2)
            .print_word(VIRTIO + 0x70)
            .poke(VIRTIO + 0x70, 3)
            .print_word(VIRTIO + 0x70)
            // A place without a device.
            .poke(VIRTIO + 0x10_0000, 1)
            .print_word(VIRTIO + 0x10_0000)
            .reset();
        let (reason, console) = run(config(), code);
        assert_eq!(reason, ExitReason::Reset);
        let ones = "\u{fffd}".repeat(4);
        let ignored = "casulo-vmm: virtio device 0 (entropy): ignored 0x6c697665 for register 0x0 \
                       while the status is 0x0\n";
        assert_eq!(console, format!("virt{ignored}virt\0\0\0\0\u{3}\0\0\0{ones}"));
    }
}

#[test]
fn all_cpus_are_made_and_one_boots() {
    if has_kvm() {
        for cpus in [2, 32] {
            let config = VmConfig { cpus, ..config() };
            let ended = run(config, Code::new().print(b"1").reset());
            assert_eq!(ended, (ExitReason::Reset, "1".to_owned()));
        }
    }
}

#[test]
fn memory_beyond_the_hole_is_accepted() {
    if has_kvm() {
        let config = VmConfig { memory_mib: 5000, ..config() };
        assert_eq!(run(config, Code::new().reset()).0, ExitReason::Reset);
    }
}

#[test]
fn a_report_tells_of_a_running_guest() {
    if has_kvm() {
        let vmm = Vmm::start(config(), Code::new().print(b"so far").idle());
        loop {
            vmm.request(&Request::Report, &[]);
            let Some(Message::Report { console, counters }) = vmm.receive() else {
                panic!("no report");
            };
            if console == "so far" {
                assert!(counters.pio_exits >= 6 && counters.max_rss_kib > 0);
                return;
            }
        }
    }
}

#[test]
fn a_connection_to_a_guest_without_driver_waits_and_the_vmm_goes_on() {
    if has_kvm() {
        let vmm = Vmm::start(config(), Code::new().idle());
        vmm.request(&Request::Connect { id: 5, port: 1 }, &[]);
        vmm.request(&Request::Listen { port: 9 }, &[]);
        vmm.request(&Request::Report, &[]);
        assert!(matches!(
            vmm.receive(),
            Some(Message::Report { .. } | Message::Refused { id: 5, .. })
        ));
    }
}

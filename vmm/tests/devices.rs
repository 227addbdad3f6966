//! Virtio devices as a hostile guest of a few instructions sees them: the whole way through KVM, vCPU,
//! transport, worker thread and device.

#![allow(clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use casulo_protocol::vmm::{DiskConfig, ExitReason, Message, VmConfig};
use common::{Code, USED, Vmm, config, has_kvm};

/// First device, and the distance to the next.
const FIRST: u64 = 0xd000_0000;
const PAGE: u64 = 0x1000;
const STATUS: u64 = 0x70;
/// Zeroed memory of the guest.
const RINGS: [u64; 4] = [0x40_0000, 0x40_1000, 0x40_2000, 0x40_3000];
const DATA: u64 = 0x50_0000;

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Runs the code on a machine with these disks, to its orderly end; returns the console.
fn run(code: Code, disks: Vec<(OwnedFd, bool)>) -> String {
    let (descriptors, read_only): (Vec<_>, Vec<_>) = disks.into_iter().unzip();
    let disks = read_only.into_iter().enumerate();
    let disks = disks.map(|(n, read_only)| DiskConfig { fd: n + 3, read_only }).collect();
    let mut vmm = Vmm::start_with(VmConfig { disks, ..config() }, code, descriptors);
    match vmm.receive() {
        Some(Message::Exited { end, console, .. }) if end.reason == ExitReason::Reset => {
            assert!(vmm.wait().success());
            console
        }
        other => panic!("unexpected {other:?}"),
    }
}

/// A disk of 8 sectors that hold their number as a letter.
fn disk() -> std::fs::File {
    let file = tempfile::tempfile().unwrap();
    for (sector, letter) in (0..).zip(b'a'..b'i') {
        file.write_all_at(&[letter; 512], sector * 512).unwrap();
    }
    file
}

/// A disk request as the first one of its ring; waits for the answer and prints its status byte.
fn request(code: Code, device: u64, ring: u64, kind: u32, sector: u32, data: u64) -> Code {
    let writes = if kind == 0 { WRITE } else { 0 };
    let status = data + 0x800;
    code.poke(DATA, kind)
        .poke(DATA + 8, sector)
        .poke(status, 0x2a)
        .descriptor(ring, 0, DATA, 16, NEXT, 1)
        .descriptor(ring, 1, data, 512, NEXT | writes, 2)
        .descriptor(ring, 2, status, 1, WRITE, 0)
        .offer_first(device, ring, 0)
        .wait_half(ring + USED + 2, 1)
        .print_word(status)
}

#[test]
fn a_broken_device_needs_a_reset_and_its_neighbour_on_the_same_thread_goes_on() {
    if !has_kvm() {
        return;
    }
    let (disk_at, rng_at) = (FIRST, FIRST + PAGE);
    let code = Code::new()
        .map_devices()
        .bring_up(disk_at, RINGS[0])
        .bring_up(rng_at, RINGS[1])
        // A chain that leads to itself.
        .descriptor(RINGS[1], 0, DATA + 0x3000, 64, NEXT | WRITE, 0)
        .offer_first(rng_at, RINGS[1], 0)
        .wait_half(rng_at + STATUS, 15 | 64)
        // Interrupted for a queue or a change of configuration.
        .print_word(rng_at + 0x60);
    let code = request(code, disk_at, RINGS[0], 0, 3, DATA + 0x1000)
        .print_word(DATA + 0x1000)
        .bring_up(rng_at, RINGS[2])
        .descriptor(RINGS[2], 0, DATA + 0x3000, 64, WRITE, 0)
        .offer_first(rng_at, RINGS[2], 0)
        .wait_half(RINGS[2] + USED + 2, 1)
        .print_word(rng_at + STATUS)
        .reset();
    let console = run(code, vec![(disk().into(), true)]);
    let log = "casulo-vmm: virtio device 1 (entropy): needs a reset by its driver: bad queue: a chain has \
               more than 16 descriptors or runs in a circle\n";
    assert_eq!(console, format!("{log}\u{3}\0\0\0\0\0\0\0dddd\u{f}\0\0\0"));
}

#[test]
fn several_disks_each_read_only_or_writable() {
    if !has_kvm() {
        return;
    }
    let files = [disk(), disk(), disk()];
    let disks = files.iter().zip([true, false, true]);
    let disks = disks.map(|(file, ro)| (file.try_clone().unwrap().into(), ro)).collect();
    let mut code = Code::new().map_devices();
    for (number, ring) in (0..3).zip(RINGS) {
        let device = FIRST + number * PAGE;
        let data = DATA + 0x1000 * (number + 1);
        code = code.bring_up(device, ring).poke(data, u32::from_le_bytes(*b"new!"));
        code = request(code, device, ring, 1, 2, data);
    }
    // Status of each write: a read-only disk gives an I/O error.
    assert_eq!(run(code.reset(), disks), "\u{1}\0\0\0\0\0\0\0\u{1}\0\0\0");
    for (file, expected) in files.iter().zip([b"cccc", b"new!", b"cccc"]) {
        let mut found = [0; 4];
        file.read_exact_at(&mut found, 1024).unwrap();
        assert_eq!(&found, expected);
    }
}

#[test]
fn accesses_of_the_wrong_width_or_place_change_nothing() {
    if !has_kvm() {
        return;
    }
    let mut code = Code::new().map_devices().bring_up(FIRST, RINGS[0]);
    for width in [1, 2, 8] {
        for offset in [STATUS, 0x38, 0x44, 0x50, 0x64, 0, 0x100] {
            code = code.poke_sized(FIRST + offset, 0, width);
        }
    }
    // Across registers, across the end of the page, and behind the last device.
    for offset in [STATUS + 1, STATUS - 2, 0x4f, PAGE - 2] {
        code = code.poke(FIRST + offset, 0);
    }
    code = code.poke(FIRST + 100 * PAGE, 0).poke_sized(FIRST + 100 * PAGE + 3, 0, 8);
    code = code.print_word(FIRST + STATUS).print_word(FIRST + STATUS + 1).print_word(FIRST + 0x44);
    let code = request(code, FIRST, RINGS[0], 0, 7, DATA + 0x1000);
    let console = run(code.print_word(DATA + 0x1000).reset(), vec![(disk().into(), true)]);
    let (log, printed) = console.rsplit_once('\n').unwrap();
    // Status 15, the same from the second byte on, ready; then the disk's answer.
    assert_eq!(printed, "\u{f}\0\0\0\0\0\0\0\u{1}\0\0\0\0\0\0\0hhhh");
    assert!(log.contains("(disk): ignored 1 bytes for register 0x70"), "{log}");
}

#[test]
fn the_log_of_a_noisy_driver_is_short() {
    if !has_kvm() {
        return;
    }
    // lea rsi of a loop: mov ecx, 5000; mov rbx, register; mov dword [rbx], 1; dec ecx; jnz
    let code = Code::new()
        .map_devices()
        .bytes(&[0xb9, 0x88, 0x13, 0, 0, 0x48, 0xbb])
        .bytes(&(FIRST + 0x38).to_le_bytes())
        .bytes(&[0xc7, 0x03, 1, 0, 0, 0, 0xff, 0xc9, 0x75, 0xf6])
        .print(b"end")
        .reset();
    let console = run(code, Vec::new());
    assert_eq!(console.lines().count(), 34, "{console}");
    assert!(console.ends_with("(entropy): and so on\nend"), "{console}");
}

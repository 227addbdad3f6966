//! Guests that never become ready, in every phase of a boot: the deadline is kept, and the message says
//! what was going on.

use std::fs;
use std::path::Path;

use casulo::protocol::agent::{BOOT_PORT, Hello, VERSION};

use crate::broken::BrokenHome;
use crate::code::{CODE, Code};
use crate::support::{Leftovers, assert_refused, casulo_path, folder, home, output};

/// Seconds for guests of a few instructions, and for those that Linux must have booted first.
const SHORT: &str = "10";
const LONG: &str = "45";

const AF_VSOCK: u64 = 40;

#[track_caller]
fn hangs(home: impl FnOnce() -> BrokenHome, seconds: &str, words: &[&str]) {
    let before = Leftovers::now();
    let home = home();
    let out = home.run_with(&["--boot-timeout", seconds]);
    let late = format!("longer than {seconds} seconds");
    let words: Vec<&str> = words.iter().copied().chain([late.as_str(), "--boot-timeout"]).collect();
    assert_refused(&out, &words);
    drop(home);
    before.assert_unchanged();
}

fn with_kernel(code: Code) -> BrokenHome {
    let home = BrokenHome::new();
    home.replace("kernel/vmlinux", "kernel/kernel.json", &code.elf());
    home
}

#[test]
fn a_vmm_that_does_not_answer() {
    let programs = folder();
    fs::copy(casulo_path(), programs.path().join("casulo")).unwrap();
    fs::copy("/bin/cat", programs.path().join("casulo-vmm")).unwrap();
    let mut command = std::process::Command::new(programs.path().join("casulo"));
    command.args(["run", "--host", "native", "--boot-timeout", "2", "--", "true"]);
    command.env("CASULO_HOME", home()).stdin(std::process::Stdio::null());
    assert_refused(&output(command), &["building the VM", "longer than 2 seconds"]);
}

#[test]
fn a_kernel_that_hangs_at_once() {
    let code = Code::new().print(b"early words");
    let place = format!("rip={:#x}", CODE + code.length());
    let words = ["before its first driver", "vCPU 0: in the kernel", &place, "early words"];
    hangs(|| with_kernel(code.spin()), SHORT, &words);
}

#[test]
fn a_kernel_whose_drivers_are_up_and_that_reads_no_disk() {
    // The first device is a disk. Its queue is not ready, so it will complain, and serve nothing.
    const STATUS: u64 = 0xd000_0070;
    let code = Code::new()
        .map_devices()
        .poke(STATUS, 1)
        .poke(STATUS, 3)
        .poke(0xd000_0024, 1)
        .poke(0xd000_0020, 1)
        .poke(STATUS, 0xb)
        .poke(STATUS, 0xf)
        .spin();
    let words = ["before it read its root file system", "vCPU 0: in the kernel, interrupts off"];
    hangs(|| with_kernel(code), SHORT, &words);
}

#[test]
fn a_kernel_that_halts_does_not_need_the_deadline() {
    let out = with_kernel(Code::new().halt()).run_with(&["--boot-timeout", "3600"]);
    assert_refused(&out, &["before its first driver", "the guest halted"]);
}

#[test]
fn a_kernel_that_crashes_does_not_need_the_deadline() {
    let out = with_kernel(Code::new().bytes(&[0x0f, 0x0b])).run_with(&["--boot-timeout", "3600"]);
    assert_refused(&out, &["before its first driver", "the guest crashed (triple fault)"]);
}

#[test]
fn an_agent_that_never_calls() {
    let words = ["starting the guest agent, before it called", "vCPU 0: halted, interrupts on"];
    hangs(|| with_agent(&[]), LONG, &words);
}

#[test]
fn an_agent_that_calls_and_says_nothing() {
    hangs(|| with_agent(&call()), LONG, &["waiting for the guest agent's greeting"]);
}

#[test]
fn an_agent_that_greets_and_does_nothing_more() {
    let hello = Hello { protocol: VERSION, agent: "test".into(), started_us: 1, dialled_us: 2 };
    let mut line = serde_json::to_vec(&hello).unwrap();
    line.push(b'\n');
    let program = [call(), say(&line)].concat();
    let words = ["waiting for the guest agent to prepare the guest"];
    hangs(|| with_agent(&program), LONG, &words);
}

/// A home whose agent runs this machine code and then sleeps for ever: the code lies over the first
/// instructions of the real one in its boot volume, which holds it uncompressed and in one piece.
fn with_agent(code: &[u8]) -> BrokenHome {
    let home = BrokenHome::new();
    let mut volume = fs::read(home.path("agent/boot.erofs")).unwrap();
    let entry = entry_of_agent(&volume);
    // mov eax, SYS_pause; syscall; jmp to the mov
    let sleep = [0xb8, 34, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7];
    let code = [code, &sleep].concat();
    volume[entry..][..code.len()].copy_from_slice(&code);
    home.replace("agent/boot.erofs", "agent/agent.json", &volume);
    home
}

/// Where the first instruction of the agent is in its boot volume.
fn entry_of_agent(volume: &[u8]) -> usize {
    let number = |offset: usize, length: usize| {
        let bytes = &volume[offset..][..length];
        bytes.iter().rev().fold(0, |number, byte| (number << 8) | usize::from(*byte))
    };
    let elf = volume.windows(8).position(|bytes| bytes == b"\x7fELF\x02\x01\x01\x00").unwrap();
    let (entry, table, count) = (number(elf + 24, 8), number(elf + 32, 8), number(elf + 56, 2));
    for index in 0..count {
        let header = elf + table + index * 56;
        let (offset, address) = (number(header + 8, 8), number(header + 16, 8));
        let size = number(header + 32, 8);
        // PT_LOAD
        if number(header, 4) == 1 && (address..address + size).contains(&entry) {
            return elf + offset + (entry - address);
        }
    }
    panic!("no entry point in the agent");
}

/// Machine code that dials the host's boot port; the socket is in ebx.
fn call() -> Vec<u8> {
    // A struct sockaddr_vm: family, port, CID.
    let low = AF_VSOCK | u64::from(BOOT_PORT) << 32;
    let high = 2u64;
    let mut code = vec![
        0xb8, 41, 0, 0, 0, // mov eax, SYS_socket
        0xbf, 40, 0, 0, 0, // mov edi, AF_VSOCK
        0xbe, 1, 0, 0, 0, // mov esi, SOCK_STREAM
        0x31, 0xd2, // xor edx, edx
        0x0f, 0x05, // syscall
        0x89, 0xc3, // mov ebx, eax
    ];
    for half in [high, low] {
        // mov rax, half; push rax
        code.extend([0x48, 0xb8]);
        code.extend(half.to_le_bytes());
        code.push(0x50);
    }
    code.extend([
        0x89, 0xdf, // mov edi, ebx
        0x48, 0x89, 0xe6, // mov rsi, rsp
        0xba, 16, 0, 0, 0, // mov edx, 16
        0xb8, 42, 0, 0, 0, // mov eax, SYS_connect
        0x0f, 0x05, // syscall
    ]);
    code
}

/// Machine code that writes `text` to the socket in ebx.
fn say(text: &[u8]) -> Vec<u8> {
    let length = u32::try_from(text.len()).unwrap().to_le_bytes();
    // The text lies in the way: call over it, and take its address from the stack.
    let mut code = vec![0xe8];
    code.extend(length);
    code.extend(text);
    code.extend([0x5e, 0x89, 0xdf, 0xba]); // pop rsi; mov edi, ebx; mov edx, length
    code.extend(length);
    code.extend([0xb8, 1, 0, 0, 0, 0x0f, 0x05]); // mov eax, SYS_write; syscall
    code
}

#[test]
fn the_patched_agent_is_the_agent() {
    // Without this the tests above could pass for a wrong reason.
    let volume = fs::read(home().join(Path::new("agent/boot.erofs"))).unwrap();
    let entry = entry_of_agent(&volume);
    // _start of a static program: endbr64 or xor ebp, ebp.
    let begin = &volume[entry..][..4];
    assert!(begin == [0xf3, 0x0f, 0x1e, 0xfa] || begin[..2] == [0x31, 0xed], "{begin:x?}");
}

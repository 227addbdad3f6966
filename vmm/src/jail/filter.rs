//! Compiles a list of system calls into a seccomp program that finds a call by halving the list.
//!
//! A program that compares one number after the other costs more than it seems: when it is installed, the
//! kernel runs it for each of its some 450 system calls, to remember which are always allowed
//! (`seccomp_cache_prepare`). With six threads the linear form cost 4 ms of a 60 ms boot; this one costs a
//! tenth.

use seccompiler::{BpfProgram, sock_filter};

/// What the kernel knows of a call, `struct seccomp_data`: offsets of its parts.
const DATA_NUMBER: u32 = 0;
const DATA_ARCH: u32 = 4;
const DATA_ARGS: u32 = 16;

/// `AUDIT_ARCH_X86_64`.
const ARCH_X86_64: u32 = 0xc000_003e;

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;
const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const JUMP_GREATER_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const JUMP_ALWAYS: u16 = (libc::BPF_JMP | libc::BPF_JA) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

const ALLOW: sock_filter = statement(RETURN, libc::SECCOMP_RET_ALLOW);
const KILL: sock_filter = statement(RETURN, libc::SECCOMP_RET_KILL_PROCESS);

/// When a call is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    /// Always.
    Always,
    /// When the lower half of this argument, with this mask applied, is one of these values.
    Argument {
        /// Number of the argument, from 0.
        index: u8,
        /// Bits to look at.
        mask: u32,
        /// Allowed values.
        values: Vec<u32>,
    },
}

/// A call and its condition.
pub type Rule = (u32, Condition);

/// The program that allows `rules` and ends the process at any other call. The rules are sorted here; the
/// last one of several for the same call holds.
#[must_use]
pub fn compile(rules: impl IntoIterator<Item = Rule>) -> BpfProgram {
    let sorted: std::collections::BTreeMap<u32, Condition> = rules.into_iter().collect();
    let sorted: Vec<Rule> = sorted.into_iter().collect();
    let mut program = vec![
        statement(LOAD, DATA_ARCH),
        jump(JUMP_EQUAL, ARCH_X86_64, 1, 0),
        KILL,
        statement(LOAD, DATA_NUMBER),
    ];
    program.extend(search(&sorted));
    program
}

/// Code that finds the call in the accumulator among `rules` and returns.
fn search(rules: &[Rule]) -> BpfProgram {
    match rules {
        [] => vec![KILL],
        [(number, condition)] => {
            let mut code = vec![jump(JUMP_EQUAL, *number, 1, 0), KILL];
            code.extend(check(condition));
            code
        }
        _ => {
            let (low, high) = rules.split_at(rules.len() / 2);
            let first = high.first().map_or(u32::MAX, |(number, _)| *number);
            let (low, high) = (search(low), search(high));
            // A jump over more than 255 instructions needs the long form.
            let mut code = match u8::try_from(low.len()) {
                Ok(over) => vec![jump(JUMP_GREATER_EQUAL, first, over, 0)],
                Err(_) => {
                    let over = u32::try_from(low.len()).unwrap_or(u32::MAX);
                    vec![jump(JUMP_GREATER_EQUAL, first, 0, 1), statement(JUMP_ALWAYS, over)]
                }
            };
            code.extend(low);
            code.extend(high);
            code
        }
    }
}

/// Code that returns what the condition says.
fn check(condition: &Condition) -> BpfProgram {
    match condition {
        Condition::Always => vec![ALLOW],
        Condition::Argument { index, mask, values } => {
            let mut code = vec![statement(LOAD, DATA_ARGS + 8 * u32::from(*index))];
            if *mask != u32::MAX {
                code.push(statement(AND, *mask));
            }
            for value in values {
                code.push(jump(JUMP_EQUAL, *value, 0, 1));
                code.push(ALLOW);
            }
            code.push(KILL);
            code
        }
    }
}

const fn statement(code: u16, k: u32) -> sock_filter {
    sock_filter { code, jt: 0, jf: 0, k }
}

const fn jump(code: u16, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What the kernel would do: the value returned for a call, and the number of steps.
    fn run(program: &[sock_filter], number: u32, arch: u32, args: [u64; 6]) -> (u32, usize) {
        let (mut at, mut accumulator, mut steps) = (0, 0u32, 0);
        loop {
            let instruction = &program[at];
            at += 1;
            steps += 1;
            match instruction.code {
                LOAD => {
                    accumulator = match instruction.k {
                        DATA_NUMBER => number,
                        DATA_ARCH => arch,
                        offset => {
                            assert_eq!((offset - DATA_ARGS) % 8, 0);
                            args[(offset - DATA_ARGS) as usize / 8] as u32
                        }
                    }
                }
                AND => accumulator &= instruction.k,
                JUMP_EQUAL | JUMP_GREATER_EQUAL => {
                    let yes = match instruction.code {
                        JUMP_EQUAL => accumulator == instruction.k,
                        _ => accumulator >= instruction.k,
                    };
                    at += usize::from(if yes { instruction.jt } else { instruction.jf });
                }
                JUMP_ALWAYS => at += instruction.k as usize,
                RETURN => return (instruction.k, steps),
                other => panic!("unknown instruction {other:#x}"),
            }
        }
    }

    fn allows(program: &[sock_filter], number: u32, args: [u64; 6]) -> bool {
        run(program, number, ARCH_X86_64, args).0 == libc::SECCOMP_RET_ALLOW
    }

    proptest! {
        #[test]
        fn exactly_the_listed_calls_are_allowed(
            listed in prop::collection::btree_set(0u32..500, 0..200),
            other in any::<u32>(),
        ) {
            let program = compile(listed.iter().map(|number| (*number, Condition::Always)));
            for number in (0..500).chain([other]) {
                prop_assert_eq!(allows(&program, number, [0; 6]), listed.contains(&number));
            }
        }
    }

    #[test]
    fn the_way_to_a_call_is_short() {
        let program = compile((0..300).map(|number| (number * 2, Condition::Always)));
        for number in 0..700 {
            assert!(run(&program, number, ARCH_X86_64, [0; 6]).1 <= 20);
        }
    }

    #[test]
    fn arguments_are_checked() {
        let ioctl = Condition::Argument { index: 1, mask: u32::MAX, values: vec![7, 9] };
        let mmap = Condition::Argument { index: 2, mask: 4, values: vec![0] };
        let program = compile([(16, ioctl), (9, mmap)]);
        for (value, expected) in [(7, true), (8, false), (9, true), (1 << 32 | 7, true)] {
            assert_eq!(allows(&program, 16, [0, value, 0, 0, 0, 0]), expected, "{value}");
        }
        for (value, expected) in [(3, true), (4, false), (7, false)] {
            assert_eq!(allows(&program, 9, [0, 0, value, 0, 0, 0]), expected, "{value}");
        }
    }

    #[test]
    fn another_architecture_is_refused() {
        let program = compile([(1, Condition::Always)]);
        // 32-bit calls, and the x32 numbers.
        assert_eq!(run(&program, 1, 0x4000_0003, [0; 6]).0, libc::SECCOMP_RET_KILL_PROCESS);
        assert!(!allows(&program, 0x4000_0001, [0; 6]));
    }
}

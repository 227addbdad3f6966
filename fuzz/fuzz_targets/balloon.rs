//! Free page reporting: the guest gives back pages of its own, and nothing else changes.
#![no_main]

use arbitrary::Arbitrary;
use casulo_fuzz::Machine;
use casulo_fuzz::limits::Limits;
use casulo_fuzz::machine::{DATA, DATA_END};
use casulo_fuzz::program::{Length, Op, Place, Setup};
use casulo_vmm::devices::virtio::balloon::BalloonDevice;

/// The queue for reports.
const REPORTING: usize = 2;
const PAGE: u64 = 4096;
const FILL: u8 = 0x5a;

#[derive(Arbitrary, Debug)]
struct Program {
    setup: Setup,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    /// A request with these ranges.
    Report { ranges: Vec<Range>, indirect: bool },
    /// Anything else.
    Other(Op),
}

#[derive(Arbitrary, Debug)]
enum Range {
    /// Pages of the data area, from the first, and bytes that are missing at either end.
    Pages {
        first: u8,
        count: u8,
        missing: (u8, u8),
    },
    Any(Place, Length),
}

impl Range {
    fn raw(&self) -> (u64, u32) {
        match self {
            Self::Pages { first, count, missing: (start, end) } => {
                let address = DATA + u64::from(first % 48) * PAGE + u64::from(*start);
                let length = u32::from(count % 48) * 4096;
                (address, length.saturating_sub(u32::from(*start) + u32::from(*end)))
            }
            Self::Any(place, length) => (place.address(), length.bytes()),
        }
    }
}

/// Reports ranges; what changes lies in them, by whole pages. Only right when no other request is under way.
fn report(machine: &mut Machine, ranges: &[(u64, u32)], indirect: bool) {
    let size = (DATA_END - DATA) as usize;
    let buffers: Vec<_> = ranges.iter().map(|(start, length)| (*start, *length, true)).collect();
    machine.offer(REPORTING, &buffers, indirect);
    let before = machine.bytes(DATA, size);
    machine.kick(REPORTING);
    let after = machine.bytes(DATA, size);
    let pages = before.chunks(PAGE as usize).zip(after.chunks(PAGE as usize));
    for ((before, after), start) in pages.zip((DATA..).step_by(PAGE as usize)) {
        if before == after {
            continue;
        }
        let covered = ranges.iter().any(|(from, length)| {
            *from <= start
                && from.checked_add(u64::from(*length)).is_some_and(|to| to >= start + PAGE)
        });
        assert!(covered, "the page at {start:#x} was not reported whole");
        assert!(after.iter().all(|byte| *byte == 0), "a page that is gone is zero");
    }
}

libfuzzer_sys::fuzz_target!(|program: Program| {
    let limits = Limits::new();
    let mut machine = Machine::new(Box::new(BalloonDevice::new()));
    machine.bring_up(&program.setup);
    machine.place(DATA, &vec![FILL; (DATA_END - DATA) as usize]);
    let mut undisturbed = true;
    for step in &program.steps {
        match step {
            Step::Report { ranges, indirect } => {
                let ranges: Vec<_> = ranges.iter().take(32).map(Range::raw).collect();
                if undisturbed {
                    report(&mut machine, &ranges, *indirect);
                } else {
                    let buffers: Vec<_> =
                        ranges.iter().map(|(at, size)| (*at, *size, true)).collect();
                    machine.offer(REPORTING, &buffers, *indirect);
                    machine.kick(REPORTING);
                }
            }
            Step::Other(op) => {
                undisturbed = false;
                machine.run(op);
            }
        }
    }

    // Whatever happened, a driver can reset the device and use it.
    machine.bring_up(&Setup { features: 0xff, halved: [0; 3] });
    machine.place(DATA, &vec![FILL; (DATA_END - DATA) as usize]);
    report(&mut machine, &[(DATA + PAGE, 8192)], false);
    assert_eq!(machine.used(REPORTING).len(), 1, "a report is taken");
    let pages = machine.bytes(DATA, 4 * PAGE as usize);
    let gone: Vec<bool> = pages.chunks(PAGE as usize).map(|page| page[0] == 0).collect();
    assert_eq!(gone, [false, true, true, false]);
    drop(machine);
    limits.check();
});

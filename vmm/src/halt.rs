//! Notices a guest that has halted for ever, of which KVM does not tell.
//!
//! Linux without ACPI ends so when it is told to halt or to power off: it stops every CPU with interrupts
//! off. KVM keeps such vCPUs asleep in `KVM_RUN` like those of an idle guest. Whether a sleeping guest can
//! wake is told by its registers, and to read those it must be woken; so it is asked only after a
//! [`PERIOD`] in which no vCPU has had any processor time. A guest that works is never disturbed, an idle
//! one for some microseconds every other period.

use std::time::{Duration, Instant};

use casulo_protocol::vmm::VcpuState;

use crate::vm::Vm;

/// How long a guest sleeps before it is asked whether it can wake.
pub const PERIOD: Duration = Duration::from_secs(1);

/// Watches one VM.
#[derive(Debug)]
pub struct HaltWatch {
    looked: Instant,
    /// Processor time of each vCPU then. The question itself takes some, so the next look after one never
    /// finds the guest asleep.
    times: Vec<Option<Duration>>,
}

impl HaltWatch {
    /// Begins to watch.
    #[must_use]
    pub fn new(vm: &Vm) -> Self {
        Self { looked: Instant::now(), times: vm.cpu_times() }
    }

    /// The first vCPU of a guest that has halted for ever. Call it at least once in each [`PERIOD`]; more
    /// often costs nothing.
    pub fn look(&mut self, vm: &Vm) -> Option<VcpuState> {
        if self.looked.elapsed() < PERIOD {
            return None;
        }
        self.looked = Instant::now();
        let times = vm.cpu_times();
        let asleep = times == self.times && times.iter().all(Option::is_some);
        self.times = times;
        if asleep { vm.stopped_for_ever() } else { None }
    }
}

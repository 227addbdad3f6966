//! What a guest looked for in vain: the model specific registers, ports and addresses that are not there.
//!
//! No such access ends a VM. But a driver that waits for a device that is not there, or a kernel that dies
//! of a #GP, is explained by it.

use std::sync::{Mutex, PoisonError};

use casulo_protocol::vmm::{AccessKind, UnknownAccess};

/// Most accesses that are remembered, of one vCPU and of all together; the first ones stay.
pub const MOST: usize = 32;

/// The accesses of one vCPU.
///
/// The lock is held to change one entry, by the vCPU, and to copy the list, by whoever asks.
#[derive(Debug, Default)]
pub struct Accesses(Mutex<Vec<UnknownAccess>>);

impl Accesses {
    /// Remembers an access. `value` is what was written, `None` for a read.
    pub fn record(&self, kind: AccessKind, address: u64, value: Option<u64>) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (write, value) = (value.is_some(), value.unwrap_or(0));
        add(&mut list, UnknownAccess { kind, address, write, value, count: 1 });
    }

    /// Adds all to `list`, within its bound.
    pub fn add_to(&self, list: &mut Vec<UnknownAccess>) {
        for access in self.0.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            add(list, *access);
        }
    }
}

fn add(list: &mut Vec<UnknownAccess>, access: UnknownAccess) {
    let same = |known: &&mut UnknownAccess| {
        (known.kind, known.address, known.write) == (access.kind, access.address, access.write)
    };
    if let Some(known) = list.iter_mut().find(same) {
        known.value = access.value;
        known.count = known.count.saturating_add(access.count);
    } else if list.len() < MOST {
        list.push(access);
    }
}

/// Up to eight bytes as the number that a processor makes of them.
#[must_use]
pub fn number(bytes: &[u8]) -> u64 {
    bytes.iter().take(8).rev().fold(0, |number, byte| (number << 8) | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(accesses: &Accesses) -> Vec<UnknownAccess> {
        let mut list = Vec::new();
        accesses.add_to(&mut list);
        list
    }

    #[test]
    fn each_place_is_remembered_once_with_its_last_value() {
        let accesses = Accesses::default();
        accesses.record(AccessKind::Port, 0x80, Some(1));
        accesses.record(AccessKind::Port, 0x80, Some(2));
        accesses.record(AccessKind::Port, 0x80, None);
        accesses.record(AccessKind::Msr, 0x80, None);
        let list = all(&accesses);
        assert_eq!(list.len(), 3);
        assert_eq!((list[0].write, list[0].value, list[0].count), (true, 2, 2));
        assert_eq!((list[1].write, list[1].count), (false, 1));
        assert_eq!(list[2].kind, AccessKind::Msr);
    }

    #[test]
    fn a_guest_that_tries_everything_is_remembered_within_bounds() {
        let (first, second) = (Accesses::default(), Accesses::default());
        for port in 0..=u64::from(u16::MAX) {
            first.record(AccessKind::Port, port, None);
            second.record(AccessKind::Port, port + 1, None);
        }
        let mut list = Vec::new();
        first.add_to(&mut list);
        second.add_to(&mut list);
        assert_eq!(list.len(), MOST);
        assert_eq!((list[0].count, list[1].count), (1, 2));
    }

    #[test]
    fn numbers_are_little_endian_and_no_longer_than_eight_bytes() {
        assert_eq!(number(&[]), 0);
        assert_eq!(number(&[0x34, 0x12]), 0x1234);
        assert_eq!(number(&[0xff; 100]), u64::MAX);
    }
}

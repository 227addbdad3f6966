//! Boot structures in low guest memory (see [`crate::layout`]), for the [64-bit boot protocol] of Linux.
//!
//! [64-bit boot protocol]: https://docs.kernel.org/arch/x86/boot.html#id1

use std::ffi::CString;

use linux_loader::cmdline::Cmdline;
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::devices::virtio::GuestMemory;
use crate::layout::{CMDLINE, CMDLINE_SIZE, GDT, IDT, PAGE_DIRECTORY, PDPT, PML4, ZERO_PAGE, e820};

const E820_RAM: u32 = 1;
/// "HdrS", and a boot loader without an assigned number.
const HEADER_MAGIC: u32 = 0x5372_6448;
const LOADER_UNDEFINED: u8 = 0xff;

/// Flat segments: null, 64-bit code, data, and the TSS that Intel's VMX insists on.
pub const GDT_ENTRIES: [u64; 4] =
    [0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x008f_8b00_0000_ffff];

/// Why the command line is not one.
#[derive(Debug, thiserror::Error)]
pub enum CmdlineError {
    /// Too long, or with characters that it cannot hold.
    #[error("bad kernel command line: {0}")]
    Invalid(#[from] linux_loader::cmdline::Error),
    /// An argument of process 1 holds white space or a quote.
    #[error("argument of process 1 holds a space or a quote: {0:?}")]
    InitArgument(String),
}

/// A virtio device as the command line names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmioDevice {
    /// Guest physical address of its registers.
    pub address: u64,
    /// Bytes of its registers.
    pub size: u64,
    /// Interrupt line.
    pub irq: u8,
}

/// The whole command line: `base`, the devices, `--` and the arguments of process 1.
pub fn cmdline(
    base: &str,
    devices: &[MmioDevice],
    init_args: &[String],
) -> Result<CString, CmdlineError> {
    let mut line = Cmdline::try_from(base, CMDLINE_SIZE)?;
    for device in devices {
        line.add_virtio_mmio_device(
            device.size,
            GuestAddress(device.address),
            device.irq.into(),
            None,
        )?;
    }
    for argument in init_args {
        if argument.is_empty() || argument.contains(|c: char| c.is_whitespace() || c == '"') {
            return Err(CmdlineError::InitArgument(argument.clone()));
        }
        line.insert_init_args(argument)?;
    }
    Ok(line.as_cstring()?)
}

/// Writes GDT, page tables, zero page and command line.
pub fn write(
    memory: &GuestMemory,
    ranges: &[(u64, u64)],
    cmdline: &CString,
) -> Result<(), GuestMemoryError> {
    memory.write_obj(GDT_ENTRIES, GuestAddress(GDT))?;
    memory.write_obj(0u64, GuestAddress(IDT))?;
    write_page_tables(memory)?;
    memory.write_slice(cmdline.as_bytes_with_nul(), GuestAddress(CMDLINE))?;

    let mut params = boot_params::default();
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.boot_flag = 0xaa55;
    params.hdr.header = HEADER_MAGIC;
    params.hdr.kernel_alignment = 0x0100_0000;
    // Both fit: the constants lie below 1 MiB.
    params.hdr.cmd_line_ptr = CMDLINE as u32;
    params.hdr.cmdline_size = CMDLINE_SIZE as u32;
    let map = e820(ranges);
    for (entry, &(addr, size)) in params.e820_table.iter_mut().zip(&map) {
        *entry = boot_e820_entry { addr, size, r#type: E820_RAM };
    }
    // At most three ranges.
    params.e820_entries = map.len().try_into().unwrap_or(u8::MAX);
    memory.write_obj(params, GuestAddress(ZERO_PAGE))
}

/// Identity-maps the first GiB with 2 MiB pages; the kernel builds its own tables at once.
fn write_page_tables(memory: &GuestMemory) -> Result<(), GuestMemoryError> {
    const PRESENT_WRITABLE: u64 = 0x3;
    const LARGE: u64 = 0x80;
    memory.write_obj(PDPT | PRESENT_WRITABLE, GuestAddress(PML4))?;
    memory.write_obj(PAGE_DIRECTORY | PRESENT_WRITABLE, GuestAddress(PDPT))?;
    let directory: Vec<u8> = (0..512u64)
        .flat_map(|page| ((page << 21) | PRESENT_WRITABLE | LARGE).to_le_bytes())
        .collect();
    memory.write_slice(&directory, GuestAddress(PAGE_DIRECTORY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_tables_map_a_gib_onto_itself() {
        let memory = crate::memory::map(32).unwrap();
        write(&memory, &[(0, 32 << 20)], &CString::default()).unwrap();
        let entry = |table: u64, index: u64| -> u64 {
            memory.read_obj(GuestAddress(table + index * 8)).unwrap()
        };
        assert_eq!(entry(PML4, 0), PDPT | 3);
        assert_eq!(entry(PDPT, 0), PAGE_DIRECTORY | 3);
        for index in [0, 1, 511] {
            assert_eq!(entry(PAGE_DIRECTORY, index), (index * 0x20_0000) | 0x83);
        }
    }

    #[test]
    fn the_zero_page_names_command_line_and_memory() {
        let memory = crate::memory::map(32).unwrap();
        write(&memory, &[(0, 32 << 20)], &CString::new("quiet").unwrap()).unwrap();
        let params: boot_params = memory.read_obj(GuestAddress(ZERO_PAGE)).unwrap();
        let pointer = params.hdr.cmd_line_ptr;
        assert_eq!(u64::from(pointer), CMDLINE);
        assert_eq!(params.e820_entries, 2);
        let text: [u8; 6] = memory.read_obj(GuestAddress(CMDLINE)).unwrap();
        assert_eq!(&text, b"quiet\0");
    }

    #[test]
    fn the_command_line_holds_devices_before_the_arguments_of_init() {
        let device = MmioDevice { address: 0xd000_0000, size: 4096, irq: 5 };
        let args = ["layers=1".to_owned(), "scratch".to_owned()];
        let line = cmdline("console=ttyS0 quiet", &[device], &args).unwrap();
        assert_eq!(
            line.to_str().unwrap(),
            "console=ttyS0 quiet virtio_mmio.device=4K@0xd0000000:5 -- layers=1 scratch"
        );
    }

    #[test]
    fn bad_command_lines_are_errors() {
        let long = "x".repeat(CMDLINE_SIZE);
        assert!(matches!(cmdline(&long, &[], &[]), Err(CmdlineError::Invalid(_))));
        for bad in ["a b", "", "a\"b", "a\nb"] {
            assert!(cmdline("quiet", &[], &[bad.to_owned()]).is_err(), "{bad:?}");
        }
        assert!(cmdline("qui\0et", &[], &[]).is_err());
    }
}

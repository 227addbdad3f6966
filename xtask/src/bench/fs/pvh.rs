//! Makes QEMU start the guest kernel as it is.
//!
//! QEMU starts an ELF kernel by the PVH protocol of Xen: 32-bit, without paging, at an address that a
//! note tells. Casulo's kernel has no such entry; its own is Linux's 64-bit one. So a copy of the file
//! gets a few instructions as one more segment that lead from the first state to the second; the kernel
//! itself stays what it is. Sources: `xen/include/public/arch-x86/hvm/start_info.h`, Linux's
//! `Documentation/arch/x86/boot.rst` ("64-bit boot protocol") and `zero-page.rst`.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::sh;

/// Where the instructions lie in the guest's memory: below the kernel, above all that firmware uses.
const PLACE: u32 = 0x00e0_0000;

/// From PVH to Linux. `KERNEL` is the physical address of Linux's 64-bit entry.
const SOURCE: &str = r#"
    .code32
    .globl _start
_start:
    # %ebx: struct hvm_start_info. Its map of memory becomes Linux's.
    movl 40(%ebx), %esi
    movl 48(%ebx), %ecx
    movb %cl, params + 0x1e8
    movl $params + 0x2d0, %edi
1:  testl %ecx, %ecx
    jz 2f
    movl (%esi), %eax
    movl %eax, (%edi)
    movl 4(%esi), %eax
    movl %eax, 4(%edi)
    movl 8(%esi), %eax
    movl %eax, 8(%edi)
    movl 12(%esi), %eax
    movl %eax, 12(%edi)
    movl 16(%esi), %eax
    movl %eax, 16(%edi)
    addl $24, %esi
    addl $20, %edi
    decl %ecx
    jmp 1b
2:  movl 24(%ebx), %eax
    movl %eax, params + 0x228
    # Long mode, the first GiB mapped to itself.
    movl $level4, %eax
    movl %eax, %cr3
    movl $0x20, %eax
    movl %eax, %cr4
    movl $0xc0000080, %ecx
    rdmsr
    orl $0x100, %eax
    wrmsr
    movl %cr0, %eax
    orl $0x80000000, %eax
    movl %eax, %cr0
    lgdt descriptor
    ljmp $0x10, $3f
    .code64
3:  movl $0x18, %eax
    movl %eax, %ds
    movl %eax, %es
    movl %eax, %ss
    movl $params, %esi
    movl $KERNEL, %eax
    jmp *%rax

    .balign 8
table:
    .quad 0, 0, 0x00af9b000000ffff, 0x00cf93000000ffff
descriptor:
    .word 31
    .long table
    .balign 4096, 0
params:
    .fill 0x1fe, 1, 0
    .word 0xaa55
    .fill 2, 1, 0
    .ascii "HdrS"
    .word 0x020c
    .fill 8, 1, 0
    .byte 0xff
    .balign 4096, 0
level4:
    .long level3 + 3, 0
    .balign 4096, 0
level3:
    .long level2 + 3, 0
    .balign 4096, 0
level2:
    .set page, 0
    .rept 512
    .long page + 0x83, 0
    .set page, page + 0x200000
    .endr
"#;

/// Sizes of an ELF64 header and a program header.
const HEADER: usize = 64;
const SEGMENT: usize = 56;

/// Writes a copy of `kernel` that QEMU starts to `out`. Works in the folder of `out`.
pub(super) fn convert(kernel: &Path, out: &Path) -> Result<()> {
    let elf = fs::read(kernel).with_context(|| format!("cannot read {}", kernel.display()))?;
    let entry = u64::from_le_bytes(field(&elf, 24)?);
    let code = assemble(entry, out.parent().context("no folder")?)?;
    fs::write(out, with_segment(elf, &code)?)?;
    Ok(())
}

fn assemble(entry: u64, folder: &Path) -> Result<Vec<u8>> {
    ensure!(entry < 1 << 30, "the kernel's entry is beyond the first GiB");
    let (source, object, code) = ("pvh.s", "pvh.o", "pvh.bin");
    let text = SOURCE.replace("KERNEL", &entry.to_string());
    fs::write(folder.join(source), text)?;
    let mut gcc = Command::new("as");
    sh::output(gcc.current_dir(folder).args(["--32", "-o", object, source]))?;
    let mut ld = Command::new("ld");
    ld.current_dir(folder).args(["-m", "elf_i386", "--oformat", "binary", "-Ttext"]);
    sh::output(ld.arg(format!("{PLACE:#x}")).args(["-o", code, object]))?;
    Ok(fs::read(folder.join(code))?)
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N]> {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().context("the kernel is cut short")
}

/// Adds a segment and the note, with a new table of program headers at the end.
fn with_segment(mut elf: Vec<u8>, code: &[u8]) -> Result<Vec<u8>> {
    ensure!(elf.starts_with(b"\x7fELF\x02\x01"), "the kernel is no 64-bit ELF file");
    let table = usize::try_from(u64::from_le_bytes(field(&elf, 32)?))?;
    ensure!(u16::from_le_bytes(field(&elf, 54)?) == 56, "odd program headers");
    let count = usize::from(u16::from_le_bytes(field(&elf, 56)?));
    let old = elf.get(table..table + count * SEGMENT).context("the kernel is cut short")?;
    // Other notes would be taken for ours.
    const NOTE: u32 = 4;
    let kept: Vec<&[u8]> = old
        .chunks_exact(SEGMENT)
        .filter(|s| s.first_chunk().is_some_and(|kind| u32::from_le_bytes(*kind) != NOTE))
        .collect();
    let mut headers = kept.concat();
    let mut add = |kind: u32, offset: usize, address: u32, size: usize, align: u64| {
        let address = u64::from(address);
        headers.extend(kind.to_le_bytes());
        headers.extend(5u32.to_le_bytes());
        for word in [offset as u64, address, address, size as u64, size as u64, align] {
            headers.extend(word.to_le_bytes());
        }
    };
    let aligned = |length: usize| length.next_multiple_of(4096);
    let code_at = aligned(elf.len());
    let note_at = aligned(code_at + code.len());
    // XEN_ELFNOTE_PHYS32_ENTRY
    let mut note = Vec::new();
    for word in [4u32, 8, 18] {
        note.extend(word.to_le_bytes());
    }
    note.extend(b"Xen\0");
    note.extend(u64::from(PLACE).to_le_bytes());
    add(1, code_at, PLACE, code.len(), 4096);
    add(NOTE, note_at, 0, note.len(), 4);
    elf.resize(code_at, 0);
    elf.extend(code);
    elf.resize(note_at, 0);
    elf.extend(note);
    let table = aligned(elf.len());
    elf.resize(table, 0);
    let count = u16::try_from(headers.len() / SEGMENT)?;
    elf.extend(headers);
    let header = elf.get_mut(..HEADER).context("the kernel is cut short")?;
    header[32..40].copy_from_slice(&(table as u64).to_le_bytes());
    header[56..58].copy_from_slice(&count.to_le_bytes());
    Ok(elf)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_keeps_its_segments_and_gets_two() {
        let mut elf = vec![0; HEADER + 2 * SEGMENT];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        elf[32..40].copy_from_slice(&64u64.to_le_bytes());
        elf[54..56].copy_from_slice(&56u16.to_le_bytes());
        elf[56..58].copy_from_slice(&2u16.to_le_bytes());
        elf[64] = 1;
        elf[64 + 24] = 7;
        // A note, which is left out.
        elf[64 + SEGMENT] = 4;
        let out = with_segment(elf, b"code").unwrap();
        let table = usize::try_from(u64::from_le_bytes(field(&out, 32).unwrap())).unwrap();
        assert_eq!(u16::from_le_bytes(field(&out, 56).unwrap()), 3);
        assert_eq!(out[table + 24], 7);
        let second = table + SEGMENT;
        let place: [u8; 8] = field(&out, second + 24).unwrap();
        assert_eq!(u64::from_le_bytes(place), u64::from(PLACE));
        let at = usize::try_from(u64::from_le_bytes(field(&out, second + 8).unwrap())).unwrap();
        assert_eq!(&out[at..at + 4], b"code");
        assert!(with_segment(vec![0; 10], b"").is_err());
    }
}

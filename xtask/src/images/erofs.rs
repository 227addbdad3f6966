//! Writes a file tree as an uncompressed erofs volume, with the same bytes for the same tree.
//!
//! `mkfs.erofs` takes a folder, so that owners need root or fakeroot and the result depends on the
//! folder's file system; the format is small enough to write it from a tree in memory instead. The
//! format is that of the kernel's `fs/erofs/erofs_fs.h` and Documentation/filesystems/erofs.rst:
//!
//! ```text
//! 0        1024         1152                                 meta end
//! | unused | superblock | inodes, each followed by its tail  | folders' blocks | files' blocks |
//! ```
//!
//! * An inode lies on a 32-byte slot whose number is its `nid`; here all are of the 64-byte kind, the
//!   one with a modification time (Python compares it with what its `.pyc` files say).
//! * An object's data is whole blocks, or, where it is short, bytes right behind the inode in the same
//!   block ("flat inline").
//!
//! The order is chosen for a guest that has to read each 4 KiB block of metadata with a request of
//! its own (the kernel does not read metadata ahead): inodes of folders and symlinks first, then those
//! of files with blocks, 64 to a block, and last the small files, whose one block holds inode and data.
//! Only a file below a block is inlined: the tail of a longer one would spread the inodes out.

use std::collections::BTreeMap;
use std::io::{self, Write};

use anyhow::{Context, Result, ensure};

use super::tree::{Folder, Inode, Kind, Names, Tree};

const BLOCK: usize = 4096;
const SUPER_OFFSET: usize = 1024;
const SUPER_SIZE: usize = 128;
const MAGIC: u32 = 0xE0F5_E1E2;
const INODE: usize = 64;
const SLOT: usize = 32;
const DIRENT: usize = 12;
const FLAT_PLAIN: u16 = 0;
const FLAT_INLINE: u16 = 2;
/// `EROFS_FEATURE_COMPAT_SB_CHKSUM`.
const SB_CHKSUM: u32 = 1;

/// Numbers that stand for the beginning of a name of an extended attribute.
const XATTR_PREFIXES: [(&[u8], u8); 3] = [(b"user.", 1), (b"trusted.", 4), (b"security.", 6)];

/// What is to be written of one inode.
struct Plan {
    /// Bytes of extended attributes behind the inode, as they are on disk.
    xattrs: Vec<u8>,
    /// Names of a folder, one list per block.
    blocks: Vec<Names>,
    /// Size of the object in bytes.
    size: u64,
    /// Whether the data (of a folder: the last block) follows the inode.
    inline: bool,
    /// Byte offset of the inode.
    at: usize,
    /// First block of the data.
    start: u32,
    links: u32,
}

/// Writes the volume; `time` (seconds since the epoch) and `uuid` go into the superblock.
pub(crate) fn write(tree: &Tree, time: u64, uuid: [u8; 16], out: &mut impl Write) -> Result<()> {
    let mut plans = plan(tree)?;
    let order = place_inodes(tree, &mut plans)?;
    let meta_end = order
        .last()
        .and_then(|&i| plans.get(i))
        .map_or(SUPER_OFFSET + SUPER_SIZE, |p| p.at + INODE + p.xattrs.len() + p.inline_len());
    let meta_blocks = meta_end.div_ceil(BLOCK);
    let total = place_data(tree, &mut plans, meta_blocks)?;

    let mut meta = vec![0u8; meta_blocks * BLOCK];
    for (number, &index) in order.iter().enumerate() {
        let (inode, plan) = (tree.inode(index)?, get(&plans, index)?);
        put(&mut meta, plan.at, &encode_inode(inode, plan, u32::try_from(number)? + 1))?;
        put(&mut meta, plan.at + INODE, &plan.xattrs)?;
        if plan.inline {
            let tail = match &inode.kind {
                Kind::File(data) => data.read()?,
                Kind::Symlink(target) => target.clone(),
                Kind::Dir => match plan.blocks.last() {
                    Some(names) => encode_dir_block(tree, &plans, names)?,
                    None => Vec::new(),
                },
                _ => Vec::new(),
            };
            put(&mut meta, plan.at + INODE + plan.xattrs.len(), &tail)?;
        }
    }
    let root = get(&plans, tree.root())?.at / SLOT;
    let count = u64::try_from(order.len())?;
    let superblock = encode_superblock(u16::try_from(root)?, count, time, total, uuid);
    put(&mut meta, SUPER_OFFSET, &superblock)?;
    let checksum = crc32c(meta.get(SUPER_OFFSET..BLOCK).context("no room for a superblock")?);
    put(&mut meta, SUPER_OFFSET + 4, &checksum.to_le_bytes())?;
    out.write_all(&meta)?;

    for &index in &order {
        let plan = get(&plans, index)?;
        let whole = plan.blocks.len().saturating_sub(usize::from(plan.inline));
        for names in plan.blocks.iter().take(whole) {
            let mut block = encode_dir_block(tree, &plans, names)?;
            block.resize(BLOCK, 0);
            out.write_all(&block)?;
        }
    }
    for &index in &order {
        if let (Kind::File(data), false) = (&tree.inode(index)?.kind, get(&plans, index)?.inline) {
            data.copy(out).with_context(|| format!("file with inode {index}"))?;
            pad(data.len(), out)?;
        } else if let (Kind::Symlink(target), false) =
            (&tree.inode(index)?.kind, get(&plans, index)?.inline)
        {
            out.write_all(target)?;
            pad(u64::try_from(target.len())?, out)?;
        }
    }
    Ok(())
}

impl Plan {
    /// Bytes behind inode and attributes.
    fn inline_len(&self) -> usize {
        if !self.inline {
            return 0;
        }
        if self.blocks.is_empty() {
            return usize::try_from(self.size).unwrap_or(usize::MAX);
        }
        self.blocks.last().map_or(0, dir_block_len)
    }

    /// Whole blocks in the data area.
    fn data_blocks(&self) -> Result<u32> {
        if self.blocks.is_empty() {
            let bytes = if self.inline { 0 } else { self.size };
            return Ok(u32::try_from(bytes.div_ceil(BLOCK as u64))?);
        }
        Ok(u32::try_from(self.blocks.len() - usize::from(self.inline))?)
    }
}

fn get(plans: &[Plan], index: usize) -> Result<&Plan> {
    plans.get(index).with_context(|| format!("no inode {index}"))
}

/// Sizes of everything; places are not known yet.
fn plan(tree: &Tree) -> Result<Vec<Plan>> {
    let links = tree.links();
    let mut folders = tree.folders()?;
    let mut plans = Vec::with_capacity(tree.inodes().len());
    for (index, inode) in tree.inodes().iter().enumerate() {
        let xattrs = encode_xattrs(inode)?;
        let room = BLOCK.checked_sub(INODE + xattrs.len()).context("too many attributes")?;
        let mut blocks = Vec::new();
        let (size, tail) = match &inode.kind {
            Kind::File(data) => (data.len(), data.len()),
            Kind::Symlink(target) => {
                let len = u64::try_from(target.len())?;
                (len, len)
            }
            Kind::Dir => {
                blocks = dir_blocks(index, folders.remove(&index).unwrap_or_default())?;
                let last = u64::try_from(blocks.last().map_or(0, dir_block_len))?;
                let whole = u64::try_from(blocks.len().saturating_sub(1) * BLOCK)?;
                (whole + last, last)
            }
            Kind::Char(..) | Kind::Block(..) | Kind::Fifo => (0, 0),
        };
        plans.push(Plan {
            xattrs,
            blocks,
            size,
            inline: tail > 0 && tail <= u64::try_from(room)?,
            at: 0,
            start: 0,
            links: links.get(&index).copied().unwrap_or(0),
        });
    }
    Ok(plans)
}

/// Gives every inode that has a name its place and returns them in that order.
fn place_inodes(tree: &Tree, plans: &mut [Plan]) -> Result<Vec<usize>> {
    let mut groups: BTreeMap<u8, Vec<usize>> = BTreeMap::new();
    let mut seen = vec![false; plans.len()];
    for index in tree.paths().values().copied() {
        let (inode, plan) = (tree.inode(index)?, get(plans, index)?);
        if let Some(seen) = seen.get_mut(index).filter(|seen| !**seen) {
            *seen = true;
            let group = match &inode.kind {
                Kind::File(_) if plan.inline => 2,
                Kind::File(_) => 1,
                _ => 0,
            };
            groups.entry(group).or_default().push(index);
        }
    }
    let order: Vec<usize> = groups.into_values().flatten().collect();
    let mut at = SUPER_OFFSET + SUPER_SIZE;
    for &index in &order {
        let plan = plans.get_mut(index).with_context(|| format!("no inode {index}"))?;
        let len = INODE + plan.xattrs.len() + plan.inline_len();
        let room = BLOCK - at % BLOCK;
        if len > room {
            at += room;
        }
        plan.at = at;
        at = (at + len).next_multiple_of(SLOT);
    }
    Ok(order)
}

/// Gives folders and then files their blocks, in the order of their inodes; returns the end.
fn place_data(tree: &Tree, plans: &mut [Plan], first: usize) -> Result<u32> {
    let mut next = u32::try_from(first)?;
    let mut order: Vec<usize> =
        (0..plans.len()).filter(|&i| get(plans, i).is_ok_and(|p| p.at > 0)).collect();
    order.sort_by_key(|&i| get(plans, i).map_or(0, |p| p.at));
    for folders in [true, false] {
        for &index in &order {
            let plan = plans.get_mut(index).with_context(|| format!("no inode {index}"))?;
            if matches!(tree.inode(index)?.kind, Kind::Dir) == folders {
                plan.start = next;
                next = next.checked_add(plan.data_blocks()?).context("the image passes 16 TiB")?;
            }
        }
    }
    Ok(next)
}

/// Splits a folder's names, `.` and `..` among them, into blocks, in byte order.
fn dir_blocks(dir: usize, folder: Folder) -> Result<Vec<Names>> {
    let mut names = folder.names;
    names.push((b".".to_vec(), dir));
    names.push((b"..".to_vec(), folder.parent));
    names.sort();
    let mut blocks: Vec<Names> = Vec::new();
    let mut used = BLOCK;
    for (name, index) in names {
        ensure!(name.len() <= 255, "a file name of {} bytes is too long", name.len());
        let len = DIRENT + name.len();
        if used + len > BLOCK {
            blocks.push(Vec::new());
            used = 0;
        }
        used += len;
        if let Some(block) = blocks.last_mut() {
            block.push((name, index));
        }
    }
    Ok(blocks)
}

fn dir_block_len(names: &Names) -> usize {
    names.iter().map(|(name, _)| DIRENT + name.len()).sum()
}

/// Entries first, then their names; the first entry's `nameoff` tells how many there are.
fn encode_dir_block(tree: &Tree, plans: &[Plan], names: &Names) -> Result<Vec<u8>> {
    let mut entries = Vec::new();
    let mut offset = names.len() * DIRENT;
    for (name, index) in names {
        let nid = u64::try_from(get(plans, *index)?.at / SLOT)?;
        entries.extend_from_slice(&nid.to_le_bytes());
        entries.extend_from_slice(&u16::try_from(offset)?.to_le_bytes());
        entries.extend_from_slice(&[file_type(&tree.inode(*index)?.kind), 0]);
        offset += name.len();
    }
    for (name, _) in names {
        entries.extend_from_slice(name);
    }
    Ok(entries)
}

/// `FT_REG_FILE` and so on.
fn file_type(kind: &Kind) -> u8 {
    match kind {
        Kind::File(_) => 1,
        Kind::Dir => 2,
        Kind::Char(..) => 3,
        Kind::Block(..) => 4,
        Kind::Fifo => 5,
        Kind::Symlink(_) => 7,
    }
}

/// `S_IFREG` and so on.
fn mode_type(kind: &Kind) -> u16 {
    match kind {
        Kind::File(_) => 0o100_000,
        Kind::Dir => 0o040_000,
        Kind::Char(..) => 0o020_000,
        Kind::Block(..) => 0o060_000,
        Kind::Fifo => 0o010_000,
        Kind::Symlink(_) => 0o120_000,
    }
}

/// `struct erofs_inode_extended`.
fn encode_inode(inode: &Inode, plan: &Plan, number: u32) -> [u8; INODE] {
    let layout = if plan.inline { FLAT_INLINE } else { FLAT_PLAIN };
    // The count of 4-byte units behind the 12-byte header, plus one; 0: no attributes.
    let icount = match plan.xattrs.len() {
        0 => 0,
        len => u16::try_from((len - 12) / 4 + 1).unwrap_or(u16::MAX),
    };
    let union = match inode.kind {
        // As the kernel's new_encode_dev().
        Kind::Char(major, minor) | Kind::Block(major, minor) => {
            (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
        }
        _ => plan.start,
    };
    let mut raw = [0u8; INODE];
    let mut field = |at: usize, bytes: &[u8]| {
        if let Some(place) = raw.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    };
    field(0, &(1 | (layout << 1)).to_le_bytes());
    field(2, &icount.to_le_bytes());
    field(4, &(mode_type(&inode.kind) | (inode.mode & 0o7777)).to_le_bytes());
    field(8, &plan.size.to_le_bytes());
    field(16, &union.to_le_bytes());
    field(20, &number.to_le_bytes());
    field(24, &inode.uid.to_le_bytes());
    field(28, &inode.gid.to_le_bytes());
    field(32, &inode.mtime.to_le_bytes());
    field(44, &plan.links.to_le_bytes());
    raw
}

/// `struct erofs_super_block`, without its checksum.
fn encode_superblock(root: u16, inodes: u64, time: u64, blocks: u32, uuid: [u8; 16]) -> Vec<u8> {
    let mut raw = Vec::with_capacity(SUPER_SIZE);
    raw.extend_from_slice(&MAGIC.to_le_bytes());
    raw.extend_from_slice(&0u32.to_le_bytes()); // checksum
    raw.extend_from_slice(&SB_CHKSUM.to_le_bytes());
    raw.extend_from_slice(&[12, 0]); // log2 of the block size; no extension slots
    raw.extend_from_slice(&root.to_le_bytes());
    raw.extend_from_slice(&inodes.to_le_bytes());
    raw.extend_from_slice(&time.to_le_bytes());
    raw.extend_from_slice(&0u32.to_le_bytes()); // nanoseconds
    raw.extend_from_slice(&blocks.to_le_bytes());
    raw.extend_from_slice(&0u32.to_le_bytes()); // the inodes are counted from block 0
    raw.extend_from_slice(&0u32.to_le_bytes()); // no shared attributes
    raw.extend_from_slice(&uuid);
    raw.resize(SUPER_SIZE, 0); // no name, no incompatible features
    raw
}

/// Header and entries, padded to 4 bytes each.
fn encode_xattrs(inode: &Inode) -> Result<Vec<u8>> {
    if inode.xattrs.is_empty() {
        return Ok(Vec::new());
    }
    let mut raw = vec![0u8; 12];
    for (name, value) in &inode.xattrs {
        let (suffix, prefix) = XATTR_PREFIXES
            .iter()
            .find_map(|(text, number)| Some((name.strip_prefix(*text)?, *number)))
            .with_context(|| format!("attribute {}", String::from_utf8_lossy(name)))?;
        raw.push(u8::try_from(suffix.len()).context("an attribute's name is too long")?);
        raw.push(prefix);
        raw.extend_from_slice(&u16::try_from(value.len())?.to_le_bytes());
        raw.extend_from_slice(suffix);
        raw.extend_from_slice(value);
        raw.resize(raw.len().next_multiple_of(4), 0);
    }
    Ok(raw)
}

fn put(meta: &mut [u8], at: usize, bytes: &[u8]) -> Result<()> {
    let place = meta.get_mut(at..at + bytes.len()).context("past the end of the metadata")?;
    place.copy_from_slice(bytes);
    Ok(())
}

fn pad(len: u64, out: &mut impl Write) -> io::Result<()> {
    let rest = (BLOCK as u64 - len % BLOCK as u64) % BLOCK as u64;
    io::copy(&mut io::Read::take(io::repeat(0), rest), out).map(drop)
}

/// CRC-32C as the kernel's `crc32c(~0, …)`: no inversion at the end.
fn crc32c(bytes: &[u8]) -> u32 {
    bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ if crc & 1 == 1 { 0x82F6_3B78 } else { 0 }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::super::tree::Data;
    use super::*;

    /// A reader as the kernel's, for what the writer writes.
    struct Volume(Vec<u8>);

    #[derive(Debug)]
    struct Found {
        format: u16,
        mode: u16,
        size: u64,
        union: u32,
        uid: u32,
        mtime: u64,
        links: u32,
        xattrs: Vec<u8>,
        data: Vec<u8>,
    }

    impl Volume {
        fn number(&self, at: usize, len: usize) -> u64 {
            self.0[at..at + len].iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte))
        }

        fn root(&self) -> u64 {
            self.number(SUPER_OFFSET + 14, 2)
        }

        fn inode(&self, nid: u64) -> Found {
            let at = usize::try_from(nid).unwrap() * SLOT;
            assert!(at % BLOCK + INODE <= BLOCK, "an inode lies in one block");
            let format = self.number(at, 2) as u16;
            let icount = self.number(at + 2, 2) as usize;
            let behind = at + INODE + if icount == 0 { 0 } else { 12 + (icount - 1) * 4 };
            let (size, union) = (self.number(at + 8, 8), self.number(at + 16, 4) as u32);
            let mode = self.number(at + 4, 2) as u16;
            let mut data = Vec::new();
            if [0o100_000, 0o040_000, 0o120_000].contains(&(mode & 0o170_000)) {
                let bytes = usize::try_from(size).unwrap();
                let inline = format >> 1 == FLAT_INLINE;
                let whole = if inline { (bytes - 1) / BLOCK * BLOCK } else { bytes };
                let start = union as usize * BLOCK;
                data.extend_from_slice(&self.0[start..][..whole]);
                if inline {
                    assert_eq!(
                        at / BLOCK,
                        (behind + bytes - whole - 1) / BLOCK,
                        "tail in one block"
                    );
                    data.extend_from_slice(&self.0[behind..][..bytes - whole]);
                }
            }
            Found {
                format,
                mode,
                size,
                union,
                uid: self.number(at + 24, 4) as u32,
                mtime: self.number(at + 32, 8),
                links: self.number(at + 44, 4) as u32,
                xattrs: self.0[at + INODE..behind].to_vec(),
                data,
            }
        }

        fn list(&self, nid: u64) -> Vec<(Vec<u8>, u64, u8)> {
            let mut names = Vec::new();
            for block in self.inode(nid).data.chunks(BLOCK) {
                let block = Volume(block.to_vec());
                let count = block.number(8, 2) as usize / DIRENT;
                for i in 0..count {
                    let offset = |i: usize| block.number(i * DIRENT + 8, 2) as usize;
                    let end = if i + 1 < count { offset(i + 1) } else { block.0.len() };
                    let name: Vec<u8> =
                        block.0[offset(i)..end].iter().copied().take_while(|b| *b != 0).collect();
                    names.push((name, block.number(i * DIRENT, 8), block.0[i * DIRENT + 10]));
                }
            }
            names
        }

        fn find(&self, path: &str) -> Found {
            let nid = path.split('/').fold(self.root(), |nid, part| {
                let names = self.list(nid);
                names.iter().find(|(name, ..)| name == part.as_bytes()).unwrap().1
            });
            self.inode(nid)
        }
    }

    fn file(bytes: Vec<u8>) -> Inode {
        Inode::new(Kind::File(Data::Bytes(bytes)), 0o640, 1_700_000_000)
    }

    fn volume(tree: &Tree) -> Volume {
        let mut bytes = Vec::new();
        write(tree, 9, [0; 16], &mut bytes).unwrap();
        Volume(bytes)
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
    }

    #[test]
    fn files_of_all_sizes_are_read_back() {
        let sizes = [0, 1, 100, 4031, 4032, 4033, 4095, 4096, 4097, 8192, 100_000];
        let mut tree = Tree::new(9);
        for size in sizes {
            tree.insert(format!("f{size}").as_bytes(), file(pattern(size))).unwrap();
        }
        let volume = volume(&tree);
        for size in sizes {
            let found = volume.find(&format!("f{size}"));
            assert_eq!(found.data, pattern(size), "{size}");
            assert_eq!((found.mode, found.mtime), (0o100_640, 1_700_000_000));
            // Only what fits behind its inode in one block is inlined.
            assert_eq!(found.format >> 1 == FLAT_INLINE, (1..=4032).contains(&size), "{size}");
        }
    }

    #[test]
    fn large_folders_are_sorted_over_blocks() {
        let mut tree = Tree::new(9);
        // Before and behind `.` and `..`.
        for name in ["+", "-", "a", "\u{e9}"] {
            tree.insert(format!("d/{name}").as_bytes(), file(vec![1])).unwrap();
        }
        for i in 0..1000 {
            tree.insert(format!("d/a file with number {i:04}").as_bytes(), file(vec![])).unwrap();
        }
        let volume = volume(&tree);
        let folder = volume.find("d");
        let names = volume.list(volume.list(volume.root()).pop().unwrap().1);
        assert_eq!(names.len(), 1006);
        assert!(names.is_sorted());
        assert!(folder.size > 4096 * 8);
        assert_eq!(folder.links, 2);
        let kind = |name: &[u8]| names.iter().find(|(n, ..)| n == name).unwrap().2;
        assert_eq!((kind(b"."), kind(b".."), kind(b"a")), (2, 2, 1));
        assert_eq!(volume.find("d/..").mode, 0o040_755);
    }

    #[test]
    fn links_devices_owners_and_attributes_are_kept() {
        let mut tree = Tree::new(9);
        let mut owned = file(b"x".to_vec());
        owned.uid = 70_000;
        owned.xattrs.insert(b"trusted.overlay.opaque".to_vec(), b"y".to_vec());
        tree.insert(b"a/owned", owned).unwrap();
        tree.insert(b"link", Inode::new(Kind::Symlink(b"a/owned".to_vec()), 0o777, 9)).unwrap();
        tree.insert(b"gone", Inode::whiteout(9)).unwrap();
        tree.insert(b"device", Inode::new(Kind::Char(0x123, 0x45678), 0o600, 9)).unwrap();
        let volume = volume(&tree);
        assert_eq!(volume.find("a/owned").uid, 70_000);
        // Header, then: length of the name, prefix `trusted.`, length of the value.
        let mut wanted = [0; 12].to_vec();
        wanted.extend_from_slice(b"\x0e\x04\x01\x00overlay.opaquey\x00");
        assert_eq!(volume.find("a/owned").xattrs, wanted);
        assert_eq!(volume.find("link").data, b"a/owned");
        assert_eq!((volume.find("gone").mode, volume.find("gone").union), (0o020_000, 0));
        assert_eq!(volume.find("device").union, 0x78 | 0x123 << 8 | 0x456 << 20);
        assert_eq!(volume.inode(volume.root()).links, 3);
    }

    #[test]
    fn the_superblock_is_the_kernels() {
        let volume = volume(&Tree::new(9));
        let at = SUPER_OFFSET;
        assert_eq!(volume.number(at, 4), u64::from(MAGIC));
        assert_eq!(volume.number(at + 12, 1), 12);
        assert_eq!(volume.number(at + 16, 8), 1, "inodes");
        assert_eq!(volume.number(at + 24, 8), 9, "time");
        assert_eq!(volume.number(at + 36, 4) as usize * BLOCK, volume.0.len());
        assert_eq!(volume.number(at + 80, 4), 0, "no incompatible features");
        let mut block = volume.0[at..BLOCK].to_vec();
        block[4..8].fill(0);
        assert_eq!(volume.number(at + 4, 4), u64::from(crc32c(&block)));
        // The check value of CRC-32C, without the inversion at its end.
        assert_eq!(!crc32c(b"123456789"), 0xE306_9283);
    }

    #[test]
    fn the_order_of_insertion_leaves_no_trace() {
        let entries = [("b/c", pattern(5000)), ("a", pattern(10)), ("b/a", pattern(70))];
        let build = |order: &[usize]| {
            let mut tree = Tree::new(9);
            for i in order {
                tree.insert(entries[*i].0.as_bytes(), file(entries[*i].1.clone())).unwrap();
            }
            volume(&tree).0
        };
        assert_eq!(build(&[0, 1, 2]), build(&[2, 1, 0]));
    }

    #[test]
    fn names_that_the_format_cannot_hold_are_errors() {
        let mut tree = Tree::new(9);
        tree.insert(&[b'x'; 256], file(vec![])).unwrap();
        assert!(write(&tree, 9, [0; 16], &mut Vec::new()).is_err());
        let mut tree = Tree::new(9);
        let mut inode = file(vec![]);
        inode.xattrs.insert(b"system.unknown".to_vec(), vec![]);
        tree.insert(b"x", inode).unwrap();
        assert!(write(&tree, 9, [0; 16], &mut Vec::new()).is_err());
    }
}

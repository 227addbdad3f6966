//! The FUSE messages of protocol 7.38 that the server understands (`linux/fuse.h`).
//!
//! The messages are parsed and built field by field, so guest bytes never become a Rust type by
//! reinterpretation. All fields are little-endian, as on every machine that runs this VMM.

/// Major protocol version.
pub(super) const MAJOR: u32 = 7;
/// Highest minor protocol version that is spoken.
pub(super) const MINOR: u32 = 38;
/// Node of the file system's root.
pub(super) const ROOT_ID: u64 = 1;

/// A message part with a fixed layout.
pub(super) trait Wire: Sized {
    /// Bytes on the wire.
    const SIZE: usize;
    /// Reads it from the start of `bytes`; `None` if they are too few.
    fn parse(bytes: &[u8]) -> Option<Self>;
    /// Appends it to `out`.
    fn put(&self, out: &mut Vec<u8>);
}

macro_rules! wire_number {
    ($($type:ty),*) => {$(
        impl Wire for $type {
            const SIZE: usize = size_of::<$type>();
            fn parse(bytes: &[u8]) -> Option<Self> {
                bytes.first_chunk().copied().map(<$type>::from_le_bytes)
            }
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}
wire_number!(u16, u32, i32, u64);

/// Declares messages by their fields in wire order, and proves their size.
macro_rules! wire {
    ($($(#[$doc:meta])* $name:ident [$size:literal] { $($field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default)]
        #[allow(dead_code, reason = "fields that only keep the layout")]
        pub(super) struct $name { $(pub(super) $field: $type),* }

        impl Wire for $name {
            const SIZE: usize = 0 $(+ <$type as Wire>::SIZE)*;
            fn parse(bytes: &[u8]) -> Option<Self> {
                let mut rest = bytes;
                $(
                    let $field = <$type as Wire>::parse(rest)?;
                    rest = rest.get(<$type as Wire>::SIZE..)?;
                )*
                let _ = rest;
                Some(Self { $($field),* })
            }
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }
        }
        const _: () = assert!(<$name as Wire>::SIZE == $size);
    )*};
}

wire! {
    /// Start of every request.
    InHeader [40] {
        len: u32, opcode: u32, unique: u64, node: u64,
        uid: u32, gid: u32, pid: u32, extensions: u16, padding: u16,
    }
    /// Start of every reply.
    OutHeader [16] { len: u32, error: i32, unique: u64 }
    /// The part of `INIT` that every version sends.
    InitIn [16] { major: u32, minor: u32, max_readahead: u32, flags: u32 }
    InitOut [64] {
        major: u32, minor: u32, max_readahead: u32, flags: u32,
        max_background: u16, congestion_threshold: u16, max_write: u32, time_gran: u32,
        max_pages: u16, map_alignment: u16, flags2: u32,
        unused0: u32, unused1: u64, unused2: u64, unused3: u64,
    }
    /// Attributes of a node.
    Attr [88] {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64,
        atime_ns: u32, mtime_ns: u32, ctime_ns: u32, mode: u32, nlink: u32,
        uid: u32, gid: u32, rdev: u32, blksize: u32, flags: u32,
    }
    EntryOut [128] {
        node: u64, generation: u64, entry_valid: u64, attr_valid: u64,
        entry_valid_ns: u32, attr_valid_ns: u32, attr: Attr,
    }
    AttrOut [104] { valid: u64, valid_ns: u32, dummy: u32, attr: Attr }
    ForgetIn [8] { lookups: u64 }
    BatchForgetIn [8] { count: u32, dummy: u32 }
    ForgetOne [16] { node: u64, lookups: u64 }
    GetattrIn [16] { flags: u32, dummy: u32, handle: u64 }
    SetattrIn [88] {
        valid: u32, padding: u32, handle: u64, size: u64, lock_owner: u64,
        atime: u64, mtime: u64, ctime: u64, atime_ns: u32, mtime_ns: u32, ctime_ns: u32,
        mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32,
    }
    MknodIn [16] { mode: u32, rdev: u32, umask: u32, padding: u32 }
    MkdirIn [8] { mode: u32, umask: u32 }
    RenameIn [8] { new_parent: u64 }
    Rename2In [16] { new_parent: u64, flags: u32, padding: u32 }
    LinkIn [8] { node: u64 }
    OpenIn [8] { flags: u32, open_flags: u32 }
    CreateIn [16] { flags: u32, mode: u32, umask: u32, open_flags: u32 }
    OpenOut [16] { handle: u64, flags: u32, padding: u32 }
    ReleaseIn [24] { handle: u64, flags: u32, release_flags: u32, lock_owner: u64 }
    /// `READ`, `READDIR` and `READDIRPLUS`.
    ReadIn [40] {
        handle: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64,
        flags: u32, padding: u32,
    }
    WriteIn [40] {
        handle: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64,
        flags: u32, padding: u32,
    }
    /// `WRITE` and `COPY_FILE_RANGE`.
    WriteOut [8] { size: u32, padding: u32 }
    FsyncIn [16] { handle: u64, flags: u32, padding: u32 }
    StatfsOut [80] {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64,
        bsize: u32, namelen: u32, frsize: u32, padding: u32, spare0: u64, spare1: u64, spare2: u64,
    }
    FallocateIn [32] { handle: u64, offset: u64, length: u64, mode: u32, padding: u32 }
    LseekIn [24] { handle: u64, offset: u64, whence: u32, padding: u32 }
    LseekOut [8] { offset: u64 }
    CopyFileRangeIn [56] {
        handle_in: u64, offset_in: u64, node_out: u64, handle_out: u64, offset_out: u64,
        length: u64, flags: u64,
    }
    SetxattrIn [8] { size: u32, flags: u32 }
    /// `GETXATTR` and `LISTXATTR`.
    GetxattrIn [8] { size: u32, padding: u32 }
    GetxattrOut [8] { size: u32, padding: u32 }
    /// One entry of a listing; its name follows, padded to 8 bytes.
    Dirent [24] { ino: u64, offset: u64, name_len: u32, kind: u32 }
}

/// Request codes.
pub(super) mod op {
    pub(in super::super) const LOOKUP: u32 = 1;
    pub(in super::super) const FORGET: u32 = 2;
    pub(in super::super) const GETATTR: u32 = 3;
    pub(in super::super) const SETATTR: u32 = 4;
    pub(in super::super) const READLINK: u32 = 5;
    pub(in super::super) const SYMLINK: u32 = 6;
    pub(in super::super) const MKNOD: u32 = 8;
    pub(in super::super) const MKDIR: u32 = 9;
    pub(in super::super) const UNLINK: u32 = 10;
    pub(in super::super) const RMDIR: u32 = 11;
    pub(in super::super) const RENAME: u32 = 12;
    pub(in super::super) const LINK: u32 = 13;
    pub(in super::super) const OPEN: u32 = 14;
    pub(in super::super) const READ: u32 = 15;
    pub(in super::super) const WRITE: u32 = 16;
    pub(in super::super) const STATFS: u32 = 17;
    pub(in super::super) const RELEASE: u32 = 18;
    pub(in super::super) const FSYNC: u32 = 20;
    pub(in super::super) const SETXATTR: u32 = 21;
    pub(in super::super) const GETXATTR: u32 = 22;
    pub(in super::super) const LISTXATTR: u32 = 23;
    pub(in super::super) const REMOVEXATTR: u32 = 24;
    pub(in super::super) const INIT: u32 = 26;
    pub(in super::super) const OPENDIR: u32 = 27;
    pub(in super::super) const READDIR: u32 = 28;
    pub(in super::super) const RELEASEDIR: u32 = 29;
    pub(in super::super) const FSYNCDIR: u32 = 30;
    pub(in super::super) const CREATE: u32 = 35;
    pub(in super::super) const INTERRUPT: u32 = 36;
    pub(in super::super) const DESTROY: u32 = 38;
    pub(in super::super) const BATCH_FORGET: u32 = 42;
    pub(in super::super) const FALLOCATE: u32 = 43;
    pub(in super::super) const READDIRPLUS: u32 = 44;
    pub(in super::super) const RENAME2: u32 = 45;
    pub(in super::super) const LSEEK: u32 = 46;
    pub(in super::super) const COPY_FILE_RANGE: u32 = 47;
    pub(in super::super) const SYNCFS: u32 = 50;
}

/// Features agreed at `INIT`.
pub(super) mod init {
    pub(in super::super) const ASYNC_READ: u32 = 1 << 0;
    pub(in super::super) const ATOMIC_O_TRUNC: u32 = 1 << 3;
    pub(in super::super) const BIG_WRITES: u32 = 1 << 5;
    pub(in super::super) const AUTO_INVAL_DATA: u32 = 1 << 12;
    pub(in super::super) const DO_READDIRPLUS: u32 = 1 << 13;
    pub(in super::super) const READDIRPLUS_AUTO: u32 = 1 << 14;
    pub(in super::super) const ASYNC_DIO: u32 = 1 << 15;
    pub(in super::super) const PARALLEL_DIROPS: u32 = 1 << 18;
    pub(in super::super) const MAX_PAGES: u32 = 1 << 22;
    pub(in super::super) const CACHE_SYMLINKS: u32 = 1 << 23;
    pub(in super::super) const SUBMOUNTS: u32 = 1 << 27;
    pub(in super::super) const HANDLE_KILLPRIV_V2: u32 = 1 << 28;
    /// There is a second word of features.
    pub(in super::super) const INIT_EXT: u32 = 1 << 30;

    /// In the second word, not upstream (see `kernel-config/patches`): forgets come late and many at a time.
    pub(in super::super) const BATCH_FORGETS: u32 = 1 << 29;
    /// In the second word, not upstream: a listing ends where a reply had room for one more entry with the
    /// longest name.
    pub(in super::super) const WHOLE_LISTINGS: u32 = 1 << 30;
}

/// Flags inside of requests and replies.
pub(super) mod flag {
    /// `GETATTR` names a handle.
    pub(in super::super) const GETATTR_HANDLE: u32 = 1 << 0;
    /// A `WRITE` from the page cache: its handle is a guess, so `O_APPEND` means nothing.
    pub(in super::super) const WRITE_CACHE: u32 = 1 << 0;
    /// `FSYNC` of the data only.
    pub(in super::super) const FSYNC_DATA: u32 = 1 << 0;
    /// The guest keeps cached pages over an open.
    pub(in super::super) const OPEN_KEEP_CACHE: u32 = 1 << 1;
    /// The guest may cache the listing of a folder.
    pub(in super::super) const OPEN_CACHE_DIR: u32 = 1 << 3;
    /// The node is the root of a mount of its own.
    pub(in super::super) const ATTR_SUBMOUNT: u32 = 1 << 0;
    /// Reading needs no `OPEN` or `OPENDIR`. Not upstream: see `kernel-config/patches`; other kernels pass
    /// over it.
    pub(in super::super) const ATTR_NO_OPEN: u32 = 1 << 30;

    /// `SETATTR`: which fields are meant.
    pub(in super::super) const SET_MODE: u32 = 1 << 0;
    pub(in super::super) const SET_UID: u32 = 1 << 1;
    pub(in super::super) const SET_GID: u32 = 1 << 2;
    pub(in super::super) const SET_SIZE: u32 = 1 << 3;
    pub(in super::super) const SET_ATIME: u32 = 1 << 4;
    pub(in super::super) const SET_MTIME: u32 = 1 << 5;
    pub(in super::super) const SET_HANDLE: u32 = 1 << 6;
    pub(in super::super) const SET_ATIME_NOW: u32 = 1 << 7;
    pub(in super::super) const SET_MTIME_NOW: u32 = 1 << 8;

    /// `FALLOCATE` modes.
    pub(in super::super) const FALLOC_KEEP_SIZE: u32 = 1;
    pub(in super::super) const FALLOC_PUNCH_HOLE: u32 = 2;
    pub(in super::super) const FALLOC_ZERO_RANGE: u32 = 0x10;

    /// `LSEEK`: where to.
    pub(in super::super) const SEEK_DATA: u32 = 3;
    pub(in super::super) const SEEK_HOLE: u32 = 4;

    /// `RENAME2` flags.
    pub(in super::super) const RENAME_NOREPLACE: u32 = 1;
    pub(in super::super) const RENAME_EXCHANGE: u32 = 2;
}

/// A message part as bytes.
#[cfg(test)]
pub(super) fn bytes_of(part: &impl Wire) -> Vec<u8> {
    let mut bytes = Vec::new();
    part.put(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_survive_the_wire_and_short_ones_are_refused() {
        let header =
            InHeader { len: 40, opcode: op::LOOKUP, unique: 7, node: 1, ..Default::default() };
        let bytes = bytes_of(&header);
        assert_eq!(bytes.len(), InHeader::SIZE);
        assert_eq!(InHeader::parse(&bytes).unwrap().unique, 7);
        for short in 0..bytes.len() {
            assert!(InHeader::parse(&bytes[..short]).is_none());
        }
    }
}

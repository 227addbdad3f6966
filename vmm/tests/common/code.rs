//! Guests of a few hand-written instructions. They run on any KVM, also on one that cannot run Linux.

/// Where the guest's code lies.
pub const CODE: u64 = 0x20_0000;
/// Where [`Code::bring_up`] puts the rings of a queue, from the descriptor table on.
pub const AVAIL: u64 = 0x400;
pub const USED: u64 = 0x800;
/// A page directory for the fourth GiB, in the guest's image.
const DIRECTORY: u64 = CODE + 0x1000;

/// Machine code in the making.
#[derive(Default)]
pub struct Code(Vec<u8>);

impl Code {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// `out dx, al`
    pub fn out(self, port: u16, value: u8) -> Self {
        let [low, high] = port.to_le_bytes();
        self.bytes(&[0xb0, value, 0x66, 0xba, low, high, 0xee])
    }

    /// Writes to the serial console.
    pub fn print(self, text: &[u8]) -> Self {
        text.iter().fold(self, |code, byte| code.out(0x3f8, *byte))
    }

    /// `in al, dx`, and the value to the serial console.
    pub fn print_port(self, port: u16) -> Self {
        let [low, high] = port.to_le_bytes();
        self.bytes(&[0x66, 0xba, low, high, 0xec]).bytes(&[0x66, 0xba, 0xf8, 0x03, 0xee])
    }

    /// Maps the fourth GiB's devices, see [`elf`].
    pub fn map_devices(self) -> Self {
        let entry = (DIRECTORY | 3).to_le_bytes();
        // mov rbx, PDPT + 3 * 8; mov rax, entry; mov [rbx], rax
        self.bytes(&[0x48, 0xbb, 0x18, 0xa0, 0, 0, 0, 0, 0, 0, 0x48, 0xb8])
            .bytes(&entry)
            .bytes(&[0x48, 0x89, 0x03])
    }

    /// Writes a word to memory.
    pub fn poke(self, address: u64, value: u32) -> Self {
        // mov rbx, address; mov dword [rbx], value
        self.bytes(&[0x48, 0xbb])
            .bytes(&address.to_le_bytes())
            .bytes(&[0xc7, 0x03])
            .bytes(&value.to_le_bytes())
    }

    /// Writes two words to memory.
    pub fn poke_wide(self, address: u64, value: u64) -> Self {
        let [low, high] = [value, value >> 32].map(|half| half as u32);
        self.poke(address, low).poke(address + 4, high)
    }

    /// Writes an immediate of one, two or eight bytes; that of eight bytes is a signed byte extended.
    pub fn poke_sized(self, address: u64, value: u8, width: usize) -> Self {
        // mov rbx, address
        let code = self.bytes(&[0x48, 0xbb]).bytes(&address.to_le_bytes());
        match width {
            // mov byte [rbx], value
            1 => code.bytes(&[0xc6, 0x03, value]),
            // mov word [rbx], value
            2 => code.bytes(&[0x66, 0xc7, 0x03, value, 0]),
            // mov qword [rbx], value
            8 => code.bytes(&[0x48, 0xc7, 0x03, value, 0, 0, 0]),
            other => panic!("no access of {other} bytes"),
        }
    }

    /// Reads memory until a half word has this value.
    pub fn wait_half(self, address: u64, value: u16) -> Self {
        let [low, high] = value.to_le_bytes();
        // mov rbx, address; cmp word [rbx], value; jne to the cmp
        self.bytes(&[0x48, 0xbb])
            .bytes(&address.to_le_bytes())
            .bytes(&[0x66, 0x81, 0x3b, low, high, 0x75, 0xf9])
    }

    /// Brings up a virtio device with one queue of 16 entries, which begins at `ring` (zeroed memory), and
    /// the features VERSION_1 alone.
    pub fn bring_up(self, device: u64, ring: u64) -> Self {
        self.poke(device + 0x70, 0)
            .poke(device + 0x70, 1)
            .poke(device + 0x70, 3)
            .poke(device + 0x24, 1)
            .poke(device + 0x20, 1)
            .poke(device + 0x70, 11)
            .poke(device + 0x30, 0)
            .poke(device + 0x38, 16)
            .poke_wide(device + 0x80, ring)
            .poke_wide(device + 0x90, ring + AVAIL)
            .poke_wide(device + 0xa0, ring + USED)
            .poke(device + 0x44, 1)
            .poke(device + 0x70, 15)
    }

    /// Writes a descriptor.
    pub fn descriptor(
        self,
        ring: u64,
        index: u16,
        address: u64,
        length: u32,
        flags: u16,
        next: u16,
    ) -> Self {
        let at = ring + 16 * u64::from(index);
        let flags = u32::from(flags) | u32::from(next) << 16;
        self.poke_wide(at, address).poke(at + 8, length).poke(at + 12, flags)
    }

    /// Makes a chain available as the first one of a ring, and kicks the queue.
    pub fn offer_first(self, device: u64, ring: u64, head: u8) -> Self {
        self.poke_sized(ring + AVAIL + 4, head, 2)
            .poke_sized(ring + AVAIL + 2, 1, 2)
            .poke(device + 0x50, 0)
    }

    /// Reads a word of memory and writes its bytes to the serial console.
    pub fn print_word(mut self, address: u64) -> Self {
        // mov rbx, address; mov ecx, [rbx]; mov dx, 0x3f8
        self = self.bytes(&[0x48, 0xbb]).bytes(&address.to_le_bytes());
        self = self.bytes(&[0x8b, 0x0b, 0x66, 0xba, 0xf8, 0x03]);
        for _ in 0..4 {
            // mov eax, ecx; out dx, al; shr ecx, 8
            self = self.bytes(&[0x89, 0xc8, 0xee, 0xc1, 0xe9, 8]);
        }
        self
    }

    /// Resets the machine by the keyboard controller.
    pub fn reset(self) -> Self {
        self.out(0x64, 0xfe).halt()
    }

    /// Sleeps until an interrupt, again and again; there is none.
    pub fn idle(self) -> Self {
        // sti; hlt; jmp to the hlt
        self.bytes(&[0xfb, 0xf4, 0xeb, 0xfd])
    }

    /// Works for ever.
    pub fn spin(self) -> Self {
        self.bytes(&[0xeb, 0xfe])
    }

    /// Reads a model specific register.
    pub fn rdmsr(self, number: u32) -> Self {
        // mov ecx, number; rdmsr
        self.bytes(&[0xb9]).bytes(&number.to_le_bytes()).bytes(&[0x0f, 0x32])
    }

    /// Writes a model specific register.
    pub fn wrmsr(self, number: u32, value: u32) -> Self {
        // mov ecx, number; mov eax, value; xor edx, edx; wrmsr
        self.bytes(&[0xb9])
            .bytes(&number.to_le_bytes())
            .bytes(&[0xb8])
            .bytes(&value.to_le_bytes())
            .bytes(&[0x31, 0xd2, 0x0f, 0x30])
    }

    /// Goes on at another address.
    pub fn jump(self, address: u64) -> Self {
        // mov rbx, address; jmp rbx
        self.bytes(&[0x48, 0xbb]).bytes(&address.to_le_bytes()).bytes(&[0xff, 0xe3])
    }

    /// Bytes so far.
    pub fn length(&self) -> u64 {
        self.0.len() as u64
    }

    /// Stops for ever.
    pub fn halt(self) -> Self {
        // cli; hlt; jmp to the hlt
        self.bytes(&[0xfa, 0xf4, 0xeb, 0xfd])
    }

    /// The code as a kernel, `vmlinux`.
    pub fn elf(self) -> Vec<u8> {
        let mut image = self.0;
        assert!(image.len() <= 0x1000);
        image.resize(0x2000, 0);
        // 2 MiB at 0xd000_0000, uncached.
        image[0x1000 + 128 * 8..][..8].copy_from_slice(&0xd000_0093u64.to_le_bytes());
        let mut file = vec![0; 120];
        file[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        file[16..20].copy_from_slice(&[2, 0, 62, 0]);
        file[24..32].copy_from_slice(&CODE.to_le_bytes());
        file[32] = 64;
        file[54] = 56;
        file[56] = 1;
        file[64] = 1;
        file[72] = 120;
        file[88..96].copy_from_slice(&CODE.to_le_bytes());
        file[96..104].copy_from_slice(&(image.len() as u64).to_le_bytes());
        file[104..112].copy_from_slice(&(image.len() as u64).to_le_bytes());
        file.extend_from_slice(&image);
        file
    }
}

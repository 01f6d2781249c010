//! Made-up addresses: where one recording has the tensors, the scratch buffer and the variables of the machine code.
//!
//! They lie where no process has memory, each at a multiple of 256 bytes as in the arena, so far apart that an address
//! beside one is never one beside another.

use std::fmt::Write as _;

use super::machine_code::MachineCode;
use crate::program::{Address, Place};
use crate::random::Choices;

/// Every address lies from here …
const LOWEST: u64 = 0x1000_0000_0000;

/// … to here. Programs and their libraries lie below or above, on x86-64 and AArch64.
const END: u64 = 0x5000_0000_0000;

/// Addresses this far before or after something are still its own: kernels may be given a pointer to before a tensor.
const BESIDE: u64 = 64 << 20;

/// In the order in which they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As they are counted.
    Forwards,
    /// The other way round.
    Backwards,
    /// Drawn.
    Shuffled,
}

/// One set of addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Of each place, in their order: where it begins, and its bytes.
    stretches: Vec<(u64, u64)>,
    /// So many of them are arguments, the others variables.
    arguments: usize,
    /// Places by address.
    by_address: Vec<usize>,
}

impl Layout {
    /// For arguments of these sizes, the scratch buffer's last, and the variables of a module. `None` where they are too
    /// many or too large for the room.
    pub fn draw(arguments: &[u64], module: &MachineCode, order: Order, choices: &mut Choices) -> Option<Self> {
        let sizes: Vec<u64> =
            arguments.iter().copied().chain(module.variables.iter().map(|(_, bytes)| *bytes)).collect();
        let mut by_address: Vec<usize> = (0..sizes.len()).collect();
        match order {
            Order::Forwards => {}
            Order::Backwards => by_address.reverse(),
            Order::Shuffled => choices.shuffle(&mut by_address),
        }
        let room = (END - LOWEST) / (sizes.len().max(1) as u64);
        let mut stretches = vec![(0, 0); sizes.len()];
        for (slot, place) in by_address.iter().enumerate() {
            let size = sizes[*place];
            // Twice, so that what is beside one and what is beside the next have room between them.
            let spare = room.checked_sub(size.checked_add(4 * BESIDE)?)?;
            let start = LOWEST + slot as u64 * room + 2 * BESIDE + choices.next() % spare.max(1);
            stretches[*place] = (start / 256 * 256, size);
        }
        Some(Self { stretches, arguments: arguments.len(), by_address })
    }

    /// What an address is in or beside, and where.
    pub fn place_of(&self, address: u64) -> Option<Address> {
        let after = self.by_address.partition_point(|place| self.stretches[*place].0 <= address.saturating_add(BESIDE));
        let place = *self.by_address.get(after.checked_sub(1)?)?;
        let (start, size) = self.stretches[place];
        let offset = address.cast_signed().checked_sub(start.cast_signed())?;
        let (least, most) = (-BESIDE.cast_signed(), (size + BESIDE).cast_signed());
        (least..=most).contains(&offset).then(|| Address { of: self.name(place), offset })
    }

    fn name(&self, place: usize) -> Place {
        match place.checked_sub(self.arguments) {
            None => Place::Argument(place),
            Some(variable) => Place::Variable(variable),
        }
    }

    /// How many bytes a place has.
    pub fn size(&self, place: Place) -> u64 {
        let index = match place {
            Place::Argument(index) => index,
            Place::Variable(index) => self.arguments + index,
        };
        self.stretches.get(index).map_or(0, |(_, size)| *size)
    }

    /// The first part of what the recorder is told (`recorder.cpp` reads it).
    pub fn told(&self, module: &MachineCode) -> String {
        let mut text = format!("addresses {LOWEST} {END}\narguments {}\n", self.arguments);
        let (arguments, variables) = self.stretches.split_at(self.arguments);
        for (start, _) in arguments {
            writeln!(text, "{start}").expect("strings take any text");
        }
        writeln!(text, "kernels {}", module.kernels.len()).expect("as above");
        for kernel in &module.kernels {
            let (registers, shared, local) = (kernel.registers, kernel.shared_bytes, kernel.local_bytes);
            let (threads, count) = (kernel.max_threads, kernel.parameters.len());
            write!(text, "{} {registers} {shared} {local} {threads} {count}", kernel.symbol).expect("as above");
            for [offset, size] in &kernel.parameters {
                write!(text, " {offset} {size}").expect("as above");
            }
            text.push('\n');
        }
        writeln!(text, "variables {}", variables.len()).expect("as above");
        for ((start, size), (symbol, _)) in variables.iter().zip(&module.variables) {
            writeln!(text, "{symbol} {start} {size}").expect("as above");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::super::recording::tests::module;
    use super::*;

    const SIZES: [u64; 3] = [4000, 40 << 30, 0];

    fn draw(order: Order, seed: u64) -> Layout {
        Layout::draw(&SIZES, &module(), order, &mut Choices(seed)).unwrap()
    }

    #[test]
    fn every_address_has_one_place() {
        for order in [Order::Forwards, Order::Backwards, Order::Shuffled] {
            for seed in 0..50 {
                let layout = draw(order, seed);
                for (index, (start, size)) in layout.stretches.iter().copied().enumerate() {
                    assert_eq!(start % 256, 0);
                    assert!(start - BESIDE > LOWEST && start + size + BESIDE < END);
                    let place = layout.name(index);
                    for offset in [-5, 0, size.cast_signed() / 2, size.cast_signed(), size.cast_signed() + 8] {
                        let address = start.checked_add_signed(offset).unwrap();
                        assert_eq!(layout.place_of(address), Some(Address { of: place, offset }));
                    }
                    assert_eq!(layout.place_of(start + size + BESIDE + 1), None);
                    assert_eq!(layout.size(place), size);
                }
            }
        }
        assert_eq!(draw(Order::Forwards, 1).place_of(0), None);
        assert_eq!(draw(Order::Forwards, 1).place_of(u64::MAX), None);
    }

    #[test]
    fn orders_differ_and_what_has_no_room_has_no_layout() {
        let starts = |layout: Layout| layout.stretches.iter().map(|(start, _)| *start).collect::<Vec<_>>();
        assert!(starts(draw(Order::Forwards, 3)).is_sorted());
        assert!(starts(draw(Order::Backwards, 3)).iter().rev().is_sorted());
        assert_ne!(starts(draw(Order::Forwards, 3)), starts(draw(Order::Forwards, 4)));
        assert!(Layout::draw(&[60 << 40], &module(), Order::Forwards, &mut Choices(1)).is_none());
        assert!(Layout::draw(&[u64::MAX], &module(), Order::Forwards, &mut Choices(1)).is_none());
    }
}

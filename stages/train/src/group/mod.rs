//! The processes that train one model together, one for each GPU.
//!
//! Every process of a group does the same in the same order; what differs is which part of a batch it computes, and what they
//! compute is added up or put together before anything depends on it. So all of them have the same weights after every update, and
//! [`Group::check_equal`] says so.
//!
//! Each process has a socket to the first one ([`link`]). Bytes go through it, and so do sums of tensors on the CPU,
//! added in the order of ranks: a result depends on the number of processes and never on which was faster. Sums of tensors on GPUs
//! are NCCL's ([`nccl`]).

mod link;
mod nccl;

use std::os::unix::net::UnixStream;

use tch::{Device, Kind, Tensor};

use self::link::{Link, Message};
use self::nccl::Communicator;
use crate::TrainError;

/// Values of a tensor that are on their way at a time: 16 MiB.
const CHUNK: i64 = 4 << 20;

/// A process's place in its group, and its way to the others.
pub struct Group {
    rank: usize,
    size: usize,
    /// Of the first process one to each of the others, in order; of the others one to the first.
    links: Vec<Link>,
    communicator: Option<Communicator>,
}

impl Group {
    /// The group of a process that trains by itself. Nothing can fail in it.
    pub fn alone() -> Self {
        Self { rank: 0, size: 1, links: Vec::new(), communicator: None }
    }

    /// The first process, with a socket to each of the others.
    pub fn first(sockets: Vec<UnixStream>) -> Self {
        let links: Vec<Link> = sockets.into_iter().zip(1..).map(|(socket, peer)| Link::new(socket, peer)).collect();
        Self { rank: 0, size: links.len() + 1, links, communicator: None }
    }

    /// Process `rank` of `size`, from 1, with a socket to the first.
    pub fn member(rank: usize, size: usize, socket: UnixStream) -> Self {
        Self { rank, size, links: vec![Link::new(socket, 0)], communicator: None }
    }

    /// Which of the processes this one is, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Whether this process writes what all of them have come to.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// The process that was found to have ended, if any was.
    pub fn lost(&self) -> Option<usize> {
        self.links.iter().find(|link| link.is_lost()).map(Link::peer)
    }

    /// Has NCCL add up tensors on GPUs from here on. All processes call it, each with one GPU that is its own.
    pub fn connect_gpus(&mut self) -> Result<(), TrainError> {
        if self.size > 1 {
            let id = if self.is_first() { nccl::unique_id()?.to_vec() } else { Vec::new() };
            let id = self.from_first(&id)?;
            self.communicator = Some(Communicator::new(&id, self.rank, self.size)?);
        }
        Ok(())
    }

    /// What every process gave, in the order of ranks.
    pub fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, TrainError> {
        if self.size == 1 {
            return Ok(vec![own.to_vec()]);
        }
        if !self.is_first() {
            self.links[0].send(Message::Gather, own)?;
            return (0..self.size).map(|_| self.links[0].receive(Message::Gather)).collect();
        }
        let mut all = vec![own.to_vec()];
        for link in &self.links {
            all.push(link.receive(Message::Gather)?);
        }
        for link in &self.links {
            all.iter().try_for_each(|part| link.send(Message::Gather, part))?;
        }
        Ok(all)
    }

    /// What the first process gave.
    pub fn from_first(&self, own: &[u8]) -> Result<Vec<u8>, TrainError> {
        let own = if self.is_first() { own } else { &[] };
        Ok(self.gather(own)?.swap_remove(0))
    }

    /// Numbers of every process, in the order of ranks.
    pub fn gather_numbers(&self, own: &[f64]) -> Result<Vec<Vec<f64>>, TrainError> {
        let bytes: Vec<u8> = own.iter().flat_map(|number| number.to_le_bytes()).collect();
        let number = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        Ok(self.gather(&bytes)?.iter().map(|part| part.chunks_exact(8).map(number).collect()).collect())
    }

    /// Sums over all processes of numbers that each of them has, added in the order of ranks.
    pub fn totals(&self, own: &[f64]) -> Result<Vec<f64>, TrainError> {
        let mut parts = self.gather_numbers(own)?.into_iter();
        let first = parts.next().unwrap_or_default();
        Ok(parts.fold(first, |sums, part| sums.iter().zip(part).map(|(sum, number)| sum + number).collect()))
    }

    /// Puts the sum over all processes in the place of a float32 tensor. Every process gets the same bits.
    pub fn sum(&self, tensor: &Tensor) -> Result<(), TrainError> {
        match (&self.communicator, tensor.device()) {
            _ if self.size == 1 => Ok(()),
            (Some(communicator), Device::Cuda(_)) => communicator.sum(tensor),
            _ => self.sum_through_links(tensor),
        }
    }

    fn sum_through_links(&self, tensor: &Tensor) -> Result<(), TrainError> {
        let flat = tensor.detach().view([-1]);
        let length = flat.size()[0];
        // By chunks, so that no process holds more than one of them for each of the others.
        for start in (0..length).step_by(CHUNK as usize) {
            let mut own = flat.narrow(0, start, CHUNK.min(length - start));
            let bytes = match self.is_first() {
                false => {
                    self.links[0].send(Message::Sum, &bytes(&own))?;
                    self.links[0].receive(Message::Sum)?
                }
                true => {
                    let mut sum = own.to_device(Device::Cpu).copy();
                    for link in &self.links {
                        sum += values(&link.receive(Message::Sum)?, own.size()[0])?;
                    }
                    let bytes = bytes(&sum);
                    self.links.iter().try_for_each(|link| link.send(Message::Sum, &bytes))?;
                    bytes
                }
            };
            let sum = values(&bytes, own.size()[0])?;
            tch::no_grad(|| own.copy_(&sum));
        }
        Ok(())
    }

    /// An error that names `what`, unless every process has the same number.
    pub fn check_equal(&self, what: &str, own: u64) -> Result<(), TrainError> {
        let all = self.gather(&own.to_le_bytes())?;
        match all.iter().position(|other| *other != all[0]) {
            None => Ok(()),
            Some(rank) => {
                let message = format!("{what} of process {} of {} are not those of the first one", rank + 1, self.size);
                Err(TrainError::new(message).with_hint("one of the GPUs computes wrongly, or this is a bug"))
            }
        }
    }
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    let tensor = tensor.to_device(Device::Cpu).to_kind(Kind::Float).contiguous();
    let elements = tensor.numel();
    let mut bytes = vec![0; elements * 4];
    tensor.copy_data_u8(&mut bytes, elements);
    bytes
}

fn values(bytes: &[u8], length: i64) -> Result<Tensor, TrainError> {
    match bytes.len() as i64 == length * 4 {
        true => Ok(Tensor::f_from_data_size(bytes, &[length], Kind::Float)?),
        false => Err(TrainError::new(format!("{} bytes came for {length} values", bytes.len()))),
    }
}

#[cfg(test)]
pub(crate) mod tests;

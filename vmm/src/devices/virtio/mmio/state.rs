//! The saved state of a device behind its transport.
//!
//! It is taken while the vCPUs stand still and the device is paused, and restored into a new VM of the same
//! devices whose guest memory is complete. A device finds its queues where it left them; a kick of each and
//! one interrupt make up for any that was under way.

use serde::{Deserialize, Serialize};

use super::{DRIVER_OK, FAILED, FEATURES_OK, MmioTransport, QueueSetup, State};
use crate::devices::virtio::DeviceError;
use crate::devices::virtio::page::STATUS_NEEDS_RESET;
use crate::devices::virtio::queue::Position;

/// A device and its transport.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportState {
    /// Device type, one of `VIRTIO_ID_*`.
    pub device_type: u32,
    /// The configuration space: the driver has read it.
    pub config: Vec<u8>,
    /// The status register.
    pub status: u32,
    /// Which half of the offered features the driver looks at.
    pub device_features_sel: u32,
    /// Which half of its features the driver writes.
    pub driver_features_sel: u32,
    /// Features that the driver took.
    pub driver_features: u64,
    /// Which queue the driver sets up.
    pub queue_sel: u32,
    /// The queues in order.
    pub queues: Vec<QueueState>,
    /// The device's own state.
    pub device: serde_json::Value,
}

/// A queue as its driver set it up, and where the device stands in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueState {
    /// Number of descriptors.
    pub size: u16,
    /// Whether the driver has finished its setup.
    pub ready: bool,
    /// Guest address of the descriptor table.
    pub desc: u64,
    /// Guest address of the available ring.
    pub avail: u64,
    /// Guest address of the used ring.
    pub used: u64,
    /// Where the device stands, if it is active.
    pub position: Option<Position>,
}

impl MmioTransport {
    /// Has the device stop until [`MmioTransport::resume`]. The vCPUs must stand still already.
    ///
    /// # Errors
    /// The device cannot stop, or waits for the host for more than ten seconds.
    pub fn pause(&self) -> Result<(), DeviceError> {
        self.worker.pause()
    }

    /// Has the device go on.
    pub fn resume(&self) -> Result<(), DeviceError> {
        self.worker.resume()
    }

    /// The state of a device that is paused.
    pub fn save(&self) -> Result<TransportState, DeviceError> {
        let mut state = self.lock();
        if state.is_resetting(super::RESET_PATIENCE) {
            return Err(DeviceError::State("a reset of the device is under way".into()));
        }
        let saved = self.worker.save()?;
        let status = self.shared.page.status();
        let queues = state.queues.iter().enumerate().map(|(index, queue)| {
            let QueueSetup { max_size: _, size, ready, desc, avail, used } = *queue;
            let position = saved.positions.get(index).copied();
            QueueState { size, ready, desc, avail, used, position }
        });
        Ok(TransportState {
            device_type: self.device_type,
            config: self.config.clone(),
            status,
            device_features_sel: state.device_features_sel,
            driver_features_sel: state.driver_features_sel,
            driver_features: state.driver_features,
            queue_sel: state.queue_sel,
            queues: queues.collect(),
            device: saved.device,
        })
    }

    /// Puts a saved state into a new device of the same kind, which is not yet in use.
    ///
    /// # Errors
    /// The state is not one of such a device; this device must not be used then.
    pub fn restore(&self, saved: TransportState) -> Result<(), DeviceError> {
        let unfit = |what: &str| DeviceError::State(format!("{}: {what}", self.shared.name));
        let mut state = self.lock();
        if self.shared.page.status() != 0 {
            return Err(unfit("the device is in use"));
        }
        if saved.device_type != self.device_type {
            return Err(unfit(&format!("the saved device has type {}", saved.device_type)));
        }
        if saved.config != self.config {
            return Err(unfit("the saved device had another configuration"));
        }
        if saved.queues.len() != state.queues.len() {
            return Err(unfit(&format!("the saved device had {} queues", saved.queues.len())));
        }
        let positions: Option<Vec<Position>> =
            saved.queues.iter().map(|queue| queue.position).collect();
        if positions.is_some() != (saved.status & DRIVER_OK != 0)
            && saved.status & (STATUS_NEEDS_RESET | FAILED) == 0
        {
            return Err(unfit("status and queues do not fit together"));
        }
        let negotiated = saved.status & FEATURES_OK != 0;
        if negotiated && !self.accepts(saved.driver_features) {
            let features = saved.driver_features;
            return Err(unfit(&format!(
                "the driver took features that are not offered: {features:#x}"
            )));
        }
        *state = State {
            device_features_sel: saved.device_features_sel,
            driver_features_sel: saved.driver_features_sel,
            driver_features: saved.driver_features,
            queue_sel: saved.queue_sel,
            queues: state
                .queues
                .iter()
                .zip(&saved.queues)
                .map(|(own, saved)| {
                    let QueueState { size, ready, desc, avail, used, position: _ } = *saved;
                    QueueSetup { max_size: own.max_size, size, ready, desc, avail, used }
                })
                .collect(),
            resetting: None,
        };
        let activation = positions.map(|positions| self.activation(&state, &positions)).transpose();
        let activation = activation.map_err(|error| unfit(&error.to_string()))?;
        let active = activation.is_some();
        self.show_features(&state);
        self.show_queue(&state);
        self.shared.page.update_status(|_| saved.status);
        self.shared.page.set_active(active);
        self.worker.restore(saved.device, activation)?;
        if active {
            for kick in self.kicks() {
                let _ = kick.write(1);
            }
            self.shared.interrupt.signal_queue()?;
        } else if saved.status & STATUS_NEEDS_RESET != 0 {
            self.shared.interrupt.signal_config()?;
        }
        Ok(())
    }
}

"""A folder of pictures to a reward model: `pictures/success/*.png` and `pictures/failure/*.png`."""

from pathlib import Path

import numpy as np
from PIL import Image

import guerdon as gd


def draw(pictures: Path, count: int) -> None:
    """Stand-ins for your own pictures: a red square in the middle is success."""
    rng = np.random.default_rng(0)
    for name in ("success", "failure"):
        (pictures / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            image = rng.integers(40, 90, (32, 32, 3), dtype=np.uint8)
            row, column = (12, 12) if name == "success" else rng.choice([0, 24], 2)
            image[row : row + 8, column : column + 8] = (220, 60, 60)
            Image.fromarray(image).save(pictures / name / f"{number:04d}.png")


def main(out: Path = Path("runs/pictures"), count: int = 100, epochs: int = 8) -> float:
    """Fit a model to the pictures; returns its area under the curve on held-out ones."""
    draw(out / "pictures", count)
    data = gd.read(out / "pictures")  # the format is detected; so are LeRobot, .pkl, .npy and others
    print(data)
    for finding in data.audit().findings:
        print(f"{finding.level}: {finding.message}")

    reward = gd.fit_reward(data, epochs=epochs, width=8, image_size=(3, 32, 32), out=out / "reward")
    auc = reward.metrics["auc"]

    picture = np.asarray(Image.open(out / "pictures" / "success" / "0000.png"))
    print(f"AUC {auc:.3f}; the first picture shows success with probability {reward.predict(picture)[0]:.3f}")
    return auc


if __name__ == "__main__":
    main()
